"""Read the arguments of a command in a shell script without executing the script.

Understood are assignments of variables and arrays (also ``+=`` and over several lines), ``${NAME}``,
``${NAME:-default}``, ``${ARRAY[@]}``, ``$((A * B))``, comments and continued lines. Words that are added
inside an ``if`` carry its condition; conditions are not evaluated.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(
    r"(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+|readonly\s+)?(\w+)(\+?)=(.*)", re.DOTALL
)
_VARIABLE = re.compile(r"\$\{(\w+)(\[[@*]\])?(?::?[-=]((?:[^{}]|\{[^{}]*\})*))?\}|\$(\w+|@)")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
_CONDITION = re.compile(r"(if|elif|for|while|until|case)\b(.*)", re.DOTALL)
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
MOST_WORDS = 100_000


@dataclass(frozen=True, slots=True)
class ShellWord:
    text: str
    condition: str = ""  # of the if in which the script adds it


@dataclass(slots=True)
class ShellCommand:
    """The words before and after the Python script or module of the training command."""

    launcher: list[ShellWord] = field(default_factory=list)
    arguments: list[ShellWord] = field(default_factory=list)


def read_command(text: str) -> ShellCommand:
    """Return the last command of ``text`` that runs a Python file with options, or a plain list of
    options.
    """
    variables: dict[str, list[ShellWord]] = {}
    conditions: list[str] = []
    found: ShellCommand | None = None
    options: list[ShellWord] = []
    for statement in _statements(text):
        statement = _control(statement, conditions)
        condition = " and ".join(conditions)
        assigned = _ASSIGNMENT.fullmatch(statement)
        if assigned is not None:
            name, more, value = assigned[1], bool(assigned[2]), assigned[3].strip()
            value = value[1:-1] if value.startswith("(") and value.endswith(")") else value
            new = [ShellWord(word.text, word.condition or condition) for word in _expand(value, variables)]
            if more:
                variables[name] = [*variables.get(name, []), *new]
            elif condition and name in variables:
                continue  # one of two values: the first one stands, as if the condition did not hold
            else:
                variables[name] = new
            continue
        expanded = _expand(statement, variables)
        script = next((i for i, word in enumerate(expanded) if word.text.endswith(".py")), None)
        if script is not None and any(word.text.startswith("--") for word in expanded[script:]):
            found = ShellCommand(expanded[:script], expanded[script + 1 :])
        elif expanded and expanded[0].text.startswith("--"):
            options += expanded
    return found or ShellCommand([], options)


def parse_options(words: list[ShellWord]) -> tuple[dict[str, object], dict[str, str]]:
    """Return options by name (``num_layers``), and the conditions of options that a script adds in an if.

    An option without a value is True; with several values it is a list.
    """
    values: dict[str, list[str]] = {}
    conditions: dict[str, str] = {}
    name = None
    for word in words:
        if re.match(r"--?[A-Za-z]", word.text):
            name, equals, value = word.text.lstrip("-").partition("=")
            name = name.replace("-", "_")
            values[name] = [value] if equals else []
            conditions.pop(name, None)
            if word.condition:
                conditions[name] = word.condition
        elif name is not None:
            values[name].append(word.text)
    return {name: _value(given) for name, given in values.items()}, conditions


def unresolved(value: object) -> str | None:
    """Return the variable in a value of a script that only its environment or arguments define."""
    values = value if isinstance(value, list) else [value]
    return next(
        (
            found[0]
            for text in values
            if isinstance(text, str) and (found := re.search(r"\$[\w{(][^ ]*", text))
        ),
        None,
    )


def _value(given: list[str]) -> object:
    read = [_scalar(text) for text in given]
    return True if not read else read[0] if len(read) == 1 else read


def _scalar(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _statements(text: str) -> list[str]:
    """Statements without comments; parentheses and quotes may span lines."""
    text = re.sub(r"\\\r?\n", " ", text)
    statements, current, quote, depth, index = [], "", "", 0, 0
    while index < len(text):
        char = text[index]
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (not current or current[-1].isspace() or current[-1] == "("):
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
            continue
        elif char == "(":
            depth += 1
        elif char == ")":
            depth = max(0, depth - 1)
        elif char in "\n;" and not depth:
            statements.append(current)
            current = ""
            index += 1
            continue
        current += " " if char == "\n" and not quote else char
        index += 1
    return [stripped for statement in (*statements, current) if (stripped := statement.strip())]


def _control(statement: str, conditions: list[str]) -> str:
    """Follow if, else and loops; return the rest of the statement."""
    while True:
        first, _, rest = statement.partition(" ")
        if first in ("then", "do"):
            statement = rest.strip()
        elif first == "else" and conditions:
            conditions[-1] = f"not ({conditions[-1]})"
            statement = rest.strip()
        elif first in ("fi", "done", "esac"):
            if conditions:
                conditions.pop()
            statement = rest.strip()
        elif (found := _CONDITION.fullmatch(statement)) is not None:
            if found[1] == "elif" and conditions:
                conditions.pop()
            conditions.append(f"{found[1]}{found[2]}".strip())
            return ""
        else:
            return statement


def _expand(text: str, variables: Mapping[str, list[ShellWord]]) -> list[ShellWord]:
    """Return the words of ``text``. A variable without a value stays as ``$NAME``."""
    text = _ARITHMETIC.sub(lambda found: _calculate(found[1], variables), text)
    words: list[ShellWord] = []
    for raw in _split(text):
        whole = _VARIABLE.fullmatch(raw.strip("\"'"))
        name = whole and (whole[1] or whole[4])
        if name and name in variables:
            words += variables[name]
        else:
            plain = _substitute(raw, variables)
            # "--flag value" in one array element is two words where the array is used without quotes
            parts = plain.split() if plain.lstrip().startswith("--") else [plain]
            words += [ShellWord(part) for part in parts]
        if len(words) > MOST_WORDS:
            raise ValueError(f"the script expands to more than {MOST_WORDS} words")
    return words


def _split(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=False, punctuation_chars="")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:  # an unclosed quote
        return text.split()


def _substitute(raw: str, variables: Mapping[str, list[ShellWord]]) -> str:
    if raw.startswith("'"):
        return raw.strip("'")

    def value(found: re.Match[str]) -> str:
        name, otherwise = found[1] or found[4], found[3]
        if name in variables:
            return " ".join(word.text for word in variables[name])
        return found[0] if otherwise is None else _substitute(otherwise, variables)

    return _VARIABLE.sub(value, raw).replace('"', "").replace("'", "")


def _calculate(expression: str, variables: Mapping[str, list[ShellWord]]) -> str:
    """Return the value of whole-number arithmetic; the expression itself if a name has no value."""
    bare = re.sub(r"(?<![\w$])([A-Za-z_]\w*)", r"$\1", expression)
    filled = _substitute(bare, variables)
    try:
        return str(_number(ast.parse(filled.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return f"$(({expression}))"


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value: int = _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
        if abs(value) < 10**18:
            return value
    raise ValueError(ast.dump(node))
