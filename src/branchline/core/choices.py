"""Words that settings choose from, where a command needs them and their own module is slow to import."""

from typing import Literal

CompactionName = Literal["drop_oldest", "drop_least_important", "summarize"]
"""How a conversation that is too long is shortened: the oldest messages or those with the fewest words of the
task become stubs, or a summary by the model replaces them."""
CompareLevel = Literal["text", "token"]
"""What must be equal for one logged call to continue another: messages and ids, or nothing but ids."""
Durability = Literal["process", "disk"]
"""What a recorded call survives. `process`: kill -9; `disk`: power loss too."""
GroupStd = Literal["sample", "population", "none"]
"""What advantages are divided by. `sample`: the standard deviation of the group's rewards as a sample, with
n − 1 in the denominator, as in TRL and verl. `population`: with n, as in the paper on GRPO. `none`: nothing,
as in Dr. GRPO."""
HistoryPolicy = Literal["template", "verbatim"]
"""`template`: the prompt shows what the chat template shows. `verbatim`: the path stays as it was sampled."""
ImageUrlPolicy = Literal["none", "public", "any"]
LayoutOption = Literal["auto", "tree", "rows"]
"""`auto`: trees if the model can follow them. `tree`: a model that cannot is refused."""
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogprobKind = Literal["raw", "processed"]
Normaliser = Literal["token", "trajectory", "episode", "constant"]
"""`token`: every trained token weighs alike. `trajectory`: the tokens of a trajectory weigh 1 together, ART's
rule. `episode`: the tokens of each of a trajectory's k samples weigh 1/k together. `constant`: weights as for
`token`, but the loss is their sum divided by episodes × a constant length, not by the sum of the weights; the
normaliser of Dr. GRPO."""
TrackerName = Literal["trackio", "wandb", "mlflow"]
