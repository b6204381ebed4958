"""Options come from the command line, variables and files, in this order; each error names its source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchline.cli.options.errors import UsageError
from tests.cli.options.plans import Limits, Plan, printed, read

ARGUMENTS: dict[str, tuple[list[str], Any]] = {
    "text": (["--text", "a"], "a"),
    "name": (["--name=-b"], "-b"),
    "count": (["--count", "-4"], -4),
    "ratio": (["--ratio", "1e-6"], 1e-6),
    "is_on": (["--is-on"], True),
    "auth": (["--no-auth"], False),
    "folder": (["--folder", "a/b"], Path("a/b")),
    "kind": (["--kind", "large"], "large"),
    "tags": (["--tags", "a", "--tags", "b"], ("a", "b")),
    "ports": (["--port", "1", "--port", "2"], (1, 2)),
    "colours": (["--colours", "red"], ("red",)),
    "counts": (["--retry", "a=1", "--retry", "b=2"], {"a": 1, "b": 2}),
    "settings": (["--settings", '{"a": [1, null]}'], {"a": [1, None]}),
}
VARIABLES: dict[str, tuple[str, str, Any]] = {
    "text": ("text", "a", "a"),
    "name": ("name", "b", "b"),
    "count": ("count", "4", 4),
    "ratio": ("ratio", "0.5", 0.5),
    "is_on": ("is_on", "yes", True),
    "auth": ("auth", "0", False),
    "folder": ("folder", "a/b", Path("a/b")),
    "kind": ("kind", "large", "large"),
    "tags": ("tags", "a\nb c\n", ("a", "b c")),
    "ports": ("port", "[1, 2]", (1, 2)),
    "counts": ("retry", "a=1\nb=2", {"a": 1, "b": 2}),
    "settings": ("settings", '{"a": 1}', {"a": 1}),
}
FILE: dict[str, tuple[str, Any]] = {
    "text": ("text: a", "a"),
    "name": ("name: null", None),
    "count": ("count: 4", 4),
    "ratio": ("ratio: 1e-6", 1e-6),
    "is_on": ("is_on: yes", True),
    "auth": ("auth: false", False),
    "folder": ("folder: a/b", Path("a/b")),
    "kind": ("kind: large", "large"),
    "tags": ("tags: [a, 'b\n\n c']", ("a", "b\nc")),
    "ports": ("port: [1, 2]", (1, 2)),
    "counts": ("retry: {a: 1}", {"a": 1}),
    "settings": ("settings: {a: {b: 1}}", {"a": {"b": 1}}),
}


def write(folder: Path, text: str, suffix: str = "yaml") -> str:
    path = folder / f"plan.{suffix}"
    path.write_text(text, "utf-8")
    return str(path)


def plan_with(field: str, value: Any) -> Plan:
    return replace(Plan(source="s"), **{field: value})


@pytest.mark.parametrize("field", ARGUMENTS)
def test_every_type_is_read_from_the_command_line(field: str) -> None:
    arguments, value = ARGUMENTS[field]
    assert read(*arguments) == plan_with(field, value)


@pytest.mark.parametrize("field", VARIABLES)
def test_every_type_is_read_from_a_variable(field: str) -> None:
    name, text, value = VARIABLES[field]
    assert read(**{name: text}) == plan_with(field, value)


@pytest.mark.parametrize("field", FILE)
def test_every_type_is_read_from_a_file(field: str, tmp_path: Path) -> None:
    text, value = FILE[field]
    assert read("--config", write(tmp_path, text)) == plan_with(field, value)


def test_toml_is_read_too(tmp_path: Path) -> None:
    file = write(tmp_path, 'source = "x"\nport = [1]\n[limits]\nmax_calls = 4\n', "toml")
    assert read("--config", file, source=None) == Plan(source="x", ports=(1,), limits=Limits(max_calls=4))


def test_keys_of_a_group_are_nested_or_not(tmp_path: Path) -> None:
    for text in ("limits: {max_calls: 4}", "max_calls: 4"):
        assert read("--config", write(tmp_path, text)).limits == Limits(max_calls=4)


def test_a_group_may_be_empty_and_mappings_may_be_merged(tmp_path: Path) -> None:
    assert read("--config", write(tmp_path, "count: 1\nlimits:\n  # max_calls: 3\n")).count == 1
    text = "settings: &one {a: 1}\nlimits: {max_calls: 4}\n"
    assert read("--config", write(tmp_path, text)).limits.max_calls == 4
    assert read("--config", write(tmp_path, "settings: {<<: {a: 1}, b: 2}")).settings == {"a": 1, "b": 2}


def test_the_command_line_comes_before_variables_and_these_before_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "{count: 1, tags: [x], max_calls: 5, is_on: true, kind: large}")
    plan = read("--config", file, "--count", "3", "--no-is-on", count="2", tags="y", max_calls="6")
    assert (plan.count, plan.tags, plan.limits.max_calls, plan.is_on, plan.kind) == (
        3,
        ("y",),
        6,
        False,
        "large",
    )
    assert read(config=file).count == 1
    assert read("--config", write(tmp_path, "count = 9", "toml"), config=file).count == 9


def test_an_empty_variable_is_as_one_that_is_not_set() -> None:
    assert read(count="", text="") == Plan(source="s")


def test_a_variable_of_something_else_is_no_option() -> None:
    assert read(hidden="x") == Plan(source="s")


@pytest.mark.parametrize(
    ("arguments", "variables", "problem"),
    [
        (["--prot", "1"], {}, "--prot: unknown option; did you mean --port? (branchline plan --help)"),
        (["--xyzzy"], {}, "--xyzzy: unknown option (branchline plan --help)"),
        (["--wet"], {}, "--wet: unknown option (branchline plan --help)"),
        (["--label", "x"], {}, "--label: its name is --text now"),
        (["--cou", "1"], {}, "--cou: unknown option; did you mean --count?"),
        (["--count", "--is-on"], {}, "--count: expected a value"),
        (["--count", "x"], {}, "--count: got 'x', expected a whole number (branchline plan --help-all)"),
        (["--count", "1.5"], {}, "--count: got '1.5', expected a whole number"),
        (["--count", "1_0"], {}, "--count: got '1_0', expected a whole number"),
        (["--ratio", "nan"], {}, "--ratio: got 'nan', expected a number"),
        (["--kind", "lrge"], {}, "--kind: got 'lrge', expected one of small, large; did you mean large?"),
        (["--retry", "a"], {}, "--retry: got 'a', expected NAME=N"),
        (
            ["--retry", "a=1", "--retry", "a=2"],
            {},
            "--retry: got 'a=2', expected one number for a, not 1 too",
        ),
        (["--settings", "[1]"], {}, "--settings: got '[1]', expected a JSON object"),
        (["--text", "a", "--text", "b"], {}, "--text: got a and b, expected one of them"),
        (["--is-on", "--no-is-on"], {}, "--is-on: got yes and no, expected one of them"),
        (["--max-calls", "0"], {}, "--max-calls: got 0, expected 1 or more"),
        (["more"], {}, "got 's', expected SOURCE only"),
        (["--is-on=yes"], {}, "--is-on: got 'yes', expected no value"),
        (["--config", "a.yaml", "--config", "b.yaml"], {}, "--config: got a.yaml and b.yaml, expected one"),
        ([], {"config": "no.toml"}, "BRANCHLINE_CONFIG no.toml: cannot be read: No such file"),
        (["--", "a", "--text"], {}, "got '--text', expected SOURCE only"),
        ([], {"count": "x"}, "BRANCHLINE_COUNT: got 'x', expected a whole number"),
        ([], {"is_on": "maybe"}, "BRANCHLINE_IS_ON: got 'maybe', expected yes or no"),
        ([], {"port": "[1"}, "BRANCHLINE_PORT: got '[1', expected JSON"),
        ([], {"max_calls": "0"}, "BRANCHLINE_MAX_CALLS: got 0, expected 1 or more"),
    ],
)
def test_an_error_is_one_sentence_that_names_its_source(
    arguments: list[str], variables: dict[str, str], problem: str
) -> None:
    with pytest.raises(UsageError) as raised:
        read(*arguments, **variables)
    assert str(raised.value).startswith(problem)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cuont: 1", "plan.yaml: cuont: unknown key; did you mean count? (branchline plan --help-all)"),
        ("limits: {max_call: 1}", "plan.yaml: limits.max_call: unknown key; did you mean max_calls?"),
        ("limits: {count: 1}", "plan.yaml: limits.count: "),
        ("label: x", "plan.yaml: label: its name is text now"),
        ("max-calls: 1", "plan.yaml: max-calls: unknown key; did you mean max_calls?"),
        ("count: abc", "plan.yaml: count: got 'abc', expected a whole number"),
        ("count: true", "plan.yaml: count: got True, expected a whole number"),
        ("count: null", "plan.yaml: count: got None, expected a whole number"),
        ("text: 5", "plan.yaml: text: got 5, expected a text"),
        ("is_on: 1", "plan.yaml: is_on: got 1, expected true or false"),
        ("tags: a", "plan.yaml: tags: got 'a', expected a list"),
        ("port: [1, x]", "plan.yaml: port: got 'x', expected a whole number"),
        ("kind: larg", "plan.yaml: kind: got 'larg', expected one of small, large; did you mean large?"),
        ("settings: [1]", "plan.yaml: settings: got [1], expected an object"),
        ("retry: {a: x}", "plan.yaml: retry: got {'a': 'x'}, expected a whole number for each name"),
        ("ratio: .inf", "plan.yaml: ratio: got inf, expected a number"),
        ("max_calls: 0", "plan.yaml: max_calls: got 0, expected 1 or more"),
        ("max_calls: 1\nlimits: {max_calls: 2}", "plan.yaml: limits.max_calls: got it twice, as "),
        ("count: 1\ncount: 2", "plan.yaml: line 1: got the key 'count' twice"),
        ("limits: 5", "plan.yaml: limits: got 5, expected keys and values"),
        ("- 1", "plan.yaml: got [1], expected keys and values"),
        ("a: [", "plan.yaml: while parsing"),
        ("detail: x", "plan.yaml: detail: got 'x', expected it with --is-on only"),
    ],
)
def test_an_error_of_a_file_names_the_file_and_the_key(tmp_path: Path, text: str, problem: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        read("--config", file)
    assert problem in str(raised.value)
    assert str(raised.value).removeprefix("--config ").startswith(file)
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("a =")
    (tmp_path / "latin.yaml").write_bytes(b"text: \xff")
    for name, problem in (
        ("no.yaml", "no.yaml: cannot be read: No such file or directory"),
        ("x.json", "x.json', expected a file named .yaml, .yml or .toml"),
        ("bad.toml", "bad.toml: Invalid value (at end of document)"),
        ("latin.yaml", "latin.yaml: 'utf-8' codec"),
    ):
        with pytest.raises(UsageError) as raised:
            read("--config", str(tmp_path / name))
        assert problem in str(raised.value)
    assert read("--config", write(tmp_path, "")) == Plan(source="s")


def test_what_is_required_is_named_with_what_it_is() -> None:
    with pytest.raises(UsageError, match=r"^SOURCE: got none, expected where it is from \(branchline plan"):
        read(source=None)


def test_an_option_without_effect_is_refused(tmp_path: Path) -> None:
    for arguments, problem in (
        (["--detail", "x"], "--detail: got 'x', expected it with --is-on only"),
        (["--detail", "x", "--is-on"], "--detail: got 'x', expected it with --kind large only"),
        (["--detail", "", "--kind", "large"], "--detail: got '', expected it with --is-on only"),
    ):
        with pytest.raises(UsageError, match=problem):
            read(*arguments)
    assert read("--detail", "x", "--is-on", "--kind", "large").detail == "x"
    assert read(detail="x").detail == "x", "variables may be set for many commands"
    assert read("--config", write(tmp_path, "detail: ''")).detail == "", (
        "as --print-config prints the default"
    )


# -- what was printed is read back -------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=4,
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PATHS = st.sampled_from([Path("a"), Path("a b/c"), Path("/x: y")])
PLANS = st.builds(
    Plan,
    source=TEXTS.filter(lambda text: text != "--"),
    text=TEXTS,
    name=st.none() | TEXTS,
    count=st.integers(),
    ratio=st.none() | FLOATS,
    is_on=st.booleans(),
    auth=st.booleans(),
    folder=st.none() | PATHS,
    kind=st.sampled_from(["small", "large"]),
    tags=st.lists(TEXTS, max_size=3).map(tuple),
    ports=st.lists(st.integers(), max_size=3).map(tuple),
    colours=st.lists(st.sampled_from(["red", "blue"]), max_size=3).map(tuple),
    counts=st.dictionaries(TEXTS.filter(bool), st.integers(0, 9), max_size=3),
    settings=st.dictionaries(TEXTS, JSON, max_size=3),
    limits=st.builds(Limits, max_calls=st.integers(1, 99), rate=FLOATS),
)


@given(PLANS)
def test_the_printed_config_is_read_back(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    folder = tmp_path_factory.mktemp("plan")
    arguments = as_arguments(plan)
    text = printed(["--print-config", *arguments])
    assert read("--config", write(folder, text), source=None) == plan
    assert printed(["--print-config", "--config", write(folder, text)]) == text


@given(PLANS)
def test_every_value_can_be_given_as_an_argument_and_as_a_variable(plan: Plan) -> None:
    assert read(*as_arguments(plan), source=None) == plan
    variables = {name: value for name, value in as_variables(plan).items() if value}
    read_back = read(**variables)
    assert read_back.tags == plan.tags
    assert read_back.settings == plan.settings
    assert (read_back.count, read_back.ratio, read_back.counts) == (plan.count, plan.ratio, plan.counts)


def as_arguments(plan: Plan) -> list[str]:
    arguments = [f"--text={plan.text}", f"--count={plan.count}", f"--kind={plan.kind}"]
    arguments += [f"--name={plan.name}"] if plan.name is not None else []
    arguments += [f"--ratio={plan.ratio!r}"] if plan.ratio is not None else []
    arguments += [f"--folder={plan.folder}"] if plan.folder is not None else []
    arguments += ["--is-on" if plan.is_on else "--no-is-on", "--auth" if plan.auth else "--no-auth"]
    arguments += [f"--tags={tag}" for tag in plan.tags] + [f"--port={port}" for port in plan.ports]
    arguments += [f"--colours={one}" for one in plan.colours]
    arguments += [f"--retry={name}={count}" for name, count in plan.counts.items()]
    arguments += [f"--settings={json.dumps(plan.settings)}"]
    arguments += [f"--max-calls={plan.limits.max_calls}", f"--rate={plan.limits.rate!r}"]
    return [*arguments, "--", plan.source]


def as_variables(plan: Plan) -> dict[str, str]:
    return {
        "count": str(plan.count),
        "ratio": "" if plan.ratio is None else repr(plan.ratio),
        "tags": json.dumps(plan.tags) if plan.tags else "",
        "retry": json.dumps(plan.counts) if plan.counts else "",
        "settings": json.dumps(plan.settings),
    }
