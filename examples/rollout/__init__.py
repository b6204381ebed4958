"""Three agents for one task, each trained by one command, and their reward.

A clerk is asked for the owner in a record, and has a tool that looks a record up:

    branchline train examples/rollout/records.jsonl --agent examples.rollout.script_agent:run \\
        --reward examples.rollout.records:score --steps 20

`script_agent` uses the openai package, `openai_agents_agent` the OpenAI Agents SDK, and `langgraph_agent`
LangGraph.
"""
