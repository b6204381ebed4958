"""Where values of options come from: the command line, then variables, then a file; else the default.

Each value keeps the name of its source, which errors of it begin with: `--port`, `BRANCHLINE_PORT`,
`serve.yaml: port`. A list on the command line replaces that of a file; the two are not joined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from branchline.cli.options.command import Command
from branchline.cli.options.errors import UsageError, show, usage_error
from branchline.cli.options.schema import CONFIG_OPTIONS, VARIABLE_PREFIX, Option, OptionSchema
from branchline.cli.options.values import WrongValueError
from branchline.core.suggestions import closest, did_you_mean, did_you_mean_path

CONFIG_VARIABLE = f"{VARIABLE_PREFIX}CONFIG"
_OTHER_VARIABLES = re.compile(r"TASK|TASK_FILE|PROMPT|SESSION|CONFIG|(ENGINE|JUDGE|UPSTREAM)_KEY(_.*)?")
"""What a run sets for its agents, and keys: no options, and no misspelt ones either."""


@dataclass(frozen=True)
class Given:
    """A value that a user gave, and what it is from."""

    value: object
    source: str
    kind: Literal["argument", "variable", "file"]


def read_arguments(
    command: Command, schema: OptionSchema, arguments: Mapping[str, Sequence[str]]
) -> dict[str, Given]:
    """The values of a command line, from the texts that it has for each option."""
    given: dict[str, Given] = {}
    for name, texts in arguments.items():
        option = schema.options[name]
        if len(set(texts)) > 1 and not option.type.is_repeated:
            shown = " and ".join(dict.fromkeys(texts))
            raise usage_error(command.name, f"{option.flag}: got {shown}, expected one of them")
        given[name] = Given(
            _read(command, option, option.flag, option.type.from_arguments, texts), option.flag, "argument"
        )
    return given


def read_variables(command: Command, schema: OptionSchema, environ: Mapping[str, str]) -> dict[str, Given]:
    """The values of the variables that are set; an empty one is as one that is not."""
    given: dict[str, Given] = {}
    for option in schema.options.values():
        if option.about.variable and (text := environ.get(option.variable)):
            value = _read(command, option, option.variable, option.type.from_text, text)
            given[option.name] = Given(value, option.variable, "variable")
    return given


def misspelt_variables(schema: OptionSchema, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are no options of a command, with the one that was probably meant."""
    known = [option.name.upper() for option in schema.options.values() if option.about.variable]
    names = [name.removeprefix(VARIABLE_PREFIX) for name in environ if name.startswith(VARIABLE_PREFIX)]
    unknown = [name for name in names if name not in known and not _OTHER_VARIABLES.fullmatch(name)]
    found = {name: closest(name, known, 0.75) for name in unknown}
    return {VARIABLE_PREFIX + name: VARIABLE_PREFIX + near for name, near in found.items() if near}


def read_file(
    command: Command, schema: OptionSchema, file: Path, source: str = "--config"
) -> dict[str, Given]:
    """The values of a YAML or TOML file. Its keys are names of options; those of a group may be nested."""
    content = _load(file, source)
    given: dict[str, Given] = {}
    for path, key, value in _leaves(schema, content, ()):
        where = f"{file}: {'.'.join((*path, key))}"
        if key in schema.groups:
            raise usage_error(command.name, f"{where}: got {show(value)}, expected keys and values")
        option = schema.options.get(key)
        if option is None or path not in ((), option.path):
            raise usage_error(
                command.name, f"{where}: {unknown(command, schema, key, 'key')}", all_options=True
            )
        if key in given:
            raise usage_error(command.name, f"{where}: got it twice, as {given[key].source} too")
        given[key] = Given(_read(command, option, where, option.type.from_data, value), where, "file")
    return given


def unknown(command: Command, schema: OptionSchema, name: str, what: str) -> str:
    """What to say of a name that is no option: its new name, or the one that was meant. `what` is an option
    or a key."""
    key = name.strip("-").replace("-", "_")
    known = {**schema.options, **dict.fromkeys(CONFIG_OPTIONS if what == "option" else schema.groups)}
    names = {_spell(option, other, what): other for other, option in known.items()}
    if key in command.renamed:
        new = command.renamed[key]
        return f"its name is {_spell(known.get(new), new, what)} now"
    return f"unknown {what}{did_you_mean(name, names)}"


def _spell(option: Option | None, name: str, what: str) -> str:
    if what == "key":
        return name
    return option.flag if option is not None else f"--{name.replace('_', '-')}"


def _leaves(
    schema: OptionSchema, content: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str, object]]:
    for key, value in content.items():
        if key in schema.groups and (value is None or isinstance(value, dict)):
            yield from _leaves(schema, value or {}, (*path, key))
        else:
            yield path, str(key), value


def _read(command: Command, option: Option, source: str, read: Callable[[Any], object], value: Any) -> object:
    try:
        return read(value)
    except WrongValueError as error:
        hint = did_you_mean(str(error.value), option.type.choices)
        problem = f"{source}: got {show(error.value)}, expected {error.expected}{hint}"
        raise usage_error(command.name, problem, all_options=not option.about.basic) from error


def _load(file: Path, source: str) -> dict[str, Any]:
    """The content of a file of options, which `source` names."""
    loaders = {".yaml": _load_yaml, ".yml": _load_yaml, ".toml": _load_toml}
    load = loaders.get(file.suffix.lower())
    if load is None:
        raise UsageError(f"{source}: got {str(file)!r}, expected a file named .yaml, .yml or .toml")
    try:
        content = load(file.read_bytes().decode())
    except OSError as error:
        near = did_you_mean_path(file)
        raise UsageError(f"{source} {file}: cannot be read: {error.strerror}{near}") from error
    except ValueError as error:
        raise UsageError(f"{source} {file}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{source} {file}: got {show(content)}, expected keys and values")
    return content


def _load_toml(text: str) -> object:
    import tomllib

    return tomllib.loads(text)


def _load_yaml(text: str) -> object:
    import yaml  # type: ignore[import-untyped]

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses keys that are there twice, of which YAML would keep the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            nodes = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            keys = [self.construct_object(key, deep=True) for key in nodes]
            for key in keys:
                if keys.count(key) > 1:
                    raise ValueError(f"line {node.start_mark.line + 1}: got the key {key!r} twice")
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return {} if content is None else content
