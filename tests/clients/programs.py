"""How each client is configured for a session and run twice, as docs/guides describe."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scripts.install_clients import PACKAGES, ClientPackage

from tests.clients import scripts
from tests.clients.scripts import Script

TIMEOUT_S = 120


@dataclass(frozen=True)
class ClientEnvironment:
    """Where a client runs, and the session it is given."""

    home: Path
    workspace: Path
    base_url: str
    anthropic_base_url: str
    api_key: str


@dataclass(frozen=True)
class ClientProgram:
    """One client, as it is run."""

    name: str
    package: ClientPackage
    script: Callable[[Path], Script]
    first_arguments: Callable[[ClientEnvironment, str], Sequence[str]]
    """Arguments for a first request."""
    resume_arguments: Callable[[ClientEnvironment, str], Sequence[str]]
    """Arguments for a request that continues the last conversation."""
    env: Callable[[ClientEnvironment], Mapping[str, str]]
    files: Callable[[ClientEnvironment], Mapping[Path, str]] = lambda setting: {}

    async def run(self, setting: ClientEnvironment, arguments: Sequence[str]) -> str:
        """What it prints; it must end well and in time."""
        process = await asyncio.create_subprocess_exec(
            self.package.executable,
            *arguments,
            cwd=setting.workspace,
            env={**plain_env(setting), **self.env(setting)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # A process group of its own, so that all of its children can be killed.
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        finally:
            kill_group(process.pid)
        printed = output.decode(errors="replace")
        assert process.returncode == 0, printed[-3000:]
        return printed


def plain_env(setting: ClientEnvironment) -> dict[str, str]:
    """Nothing of this machine but where programs are: no keys, no proxies, another home."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(setting.home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }


def kill_group(leader: int) -> None:
    """Kills the rest of a process group that was started here."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def prepare(program: ClientProgram, setting: ClientEnvironment) -> None:
    """Writes the client's configuration."""
    for path, text in program.files(setting).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# -- Claude Code -------------------------------------------------------------------------------------

_ALLOWED = ("--allowedTools", "Bash", "Read", "Edit", "Agent")


def claude_env(setting: ClientEnvironment, model: str = "branchline") -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": setting.anthropic_base_url,
        "ANTHROPIC_API_KEY": setting.api_key,
        "ANTHROPIC_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }


def _claude_code(name: str, model: str) -> ClientProgram:
    return ClientProgram(
        name,
        PACKAGES["claude-code"],
        scripts.claude_code,
        first_arguments=lambda setting, prompt: ("-p", prompt, *_ALLOWED),
        resume_arguments=lambda setting, prompt: ("-p", "--continue", prompt, *_ALLOWED),
        env=lambda setting: claude_env(setting, model),
    )


# -- Codex -------------------------------------------------------------------------------------------


def _codex(name: str, model: str, script: Callable[[Path], Script]) -> ClientProgram:
    def flags(setting: ClientEnvironment) -> tuple[str, ...]:
        provider = (
            f'{{name="branchline", base_url="{setting.base_url}", env_key="BRANCHLINE_KEY", '
            'wire_api="responses"}'
        )
        return (
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            *("-c", 'model_provider="branchline"'),
            *("-c", f"model_providers.branchline={provider}"),
            *("-c", f'model="{model}"'),
        )

    return ClientProgram(
        name,
        PACKAGES["codex"],
        script,
        first_arguments=lambda setting, prompt: ("exec", *flags(setting), prompt),
        resume_arguments=lambda setting, prompt: ("exec", "resume", "--last", *flags(setting), prompt),
        env=lambda setting: {"BRANCHLINE_KEY": setting.api_key},
    )


# -- clients of Chat Completions ----------------------------------------------------------------------


def _qwen_code() -> ClientProgram:
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    return ClientProgram(
        "qwen-code",
        PACKAGES["qwen-code"],
        scripts.qwen_code,
        first_arguments=lambda setting, prompt: ("--yolo", "-p", prompt),
        resume_arguments=lambda setting, prompt: ("--yolo", "--continue", "-p", prompt),
        env=lambda setting: {
            "OPENAI_BASE_URL": setting.base_url,
            "OPENAI_API_KEY": setting.api_key,
            "OPENAI_MODEL": "branchline",
        },
        files=lambda setting: {setting.home / ".qwen" / "settings.json": json.dumps(settings)},
    )


def _opencode() -> ClientProgram:
    def config(setting: ClientEnvironment) -> str:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": setting.base_url, "apiKey": setting.api_key},
            "models": {"branchline": {}},
        }
        return json.dumps(
            {
                "provider": {"branchline": provider},
                "permission": {"*": "allow"},
                "share": "disabled",
                "autoupdate": False,
            }
        )

    model = ("--model", "branchline/branchline")
    return ClientProgram(
        "opencode",
        PACKAGES["opencode"],
        scripts.opencode,
        first_arguments=lambda setting, prompt: ("run", *model, prompt),
        resume_arguments=lambda setting, prompt: ("run", "--continue", *model, prompt),
        env=lambda setting: {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        files=lambda setting: {setting.home / ".config" / "opencode" / "opencode.json": config(setting)},
    )


def _pi() -> ClientProgram:
    def models(setting: ClientEnvironment) -> str:
        provider = {
            "baseUrl": setting.base_url,
            "api": "openai-completions",
            "apiKey": setting.api_key,
            "models": [{"id": "branchline"}],
        }
        return json.dumps({"providers": {"branchline": provider}})

    model = ("--provider", "branchline", "--model", "branchline")
    return ClientProgram(
        "pi",
        PACKAGES["pi"],
        scripts.pi,
        first_arguments=lambda setting, prompt: (*model, "-p", prompt),
        resume_arguments=lambda setting, prompt: (*model, "--continue", "-p", prompt),
        env=lambda setting: {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"},
        files=lambda setting: {setting.home / ".pi" / "agent" / "models.json": models(setting)},
    )


PROGRAMS = {
    program.name: program
    for program in (
        _claude_code("claude-code", "branchline"),
        # Models of this name get reminders inside messages instead of system messages between them.
        _claude_code("claude-code, reminders in text", "claude-sonnet-4-5"),
        _codex("codex", "branchline", scripts.codex),
        _codex("codex, code mode", "gpt-6-luna", scripts.codex_code_mode),
        _qwen_code(),
        _opencode(),
        _pi(),
    )
}
