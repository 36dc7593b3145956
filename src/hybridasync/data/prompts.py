"""From a row's prompt field to the text that the model gets."""

from __future__ import annotations

from dataclasses import dataclass

from hybridasync.config.models import DataSection
from hybridasync.data.jsonl import Row
from hybridasync.data.tokenizer import TextTokenizer
from hybridasync.errors import ConfigError

PLACEHOLDER = "{prompt}"


@dataclass(frozen=True, slots=True)
class PromptText:
    """`model_input` is encoded, special tokens and all; `shown` is for rewards and people."""

    model_input: str
    shown: str


def prompt_text(
    row: Row, *, data: DataSection, tokenizer: TextTokenizer, setting: str, key: str | None = None
) -> PromptText:
    """The prompt of a row: a string, or chat messages, which always go through the chat template.

    `prompt_template` is put around a string first; `apply_chat_template` makes it the turn of a user.
    Raises ConfigError that names the line.
    """
    key = data.prompt_key if key is None else key
    value = row.fields.get(key)
    if value is None:
        fields = ", ".join(map(repr, row.fields)) or "none"
        raise ConfigError(f"{row.place}: no field {key!r} with the prompt; it has {fields}", setting=setting)
    if isinstance(value, str):
        text = _around(value, data.prompt_template)
        if not data.apply_chat_template:
            return PromptText(text, text)
        return PromptText(_render([{"role": "user", "content": text}], row, tokenizer, setting=setting), text)
    messages = _messages(value, row, key, setting=setting)
    if data.prompt_template is not None:
        raise ConfigError(
            f"{row.place}: data.prompt_template is for prompts that are strings, and this one is chat messages",
            setting=setting,
        )
    rendered = _render(messages, row, tokenizer, setting=setting)
    return PromptText(rendered, rendered)


def _around(text: str, template: str | None) -> str:
    if template is None:
        return text
    if PLACEHOLDER not in template:
        raise ConfigError(f"must contain {PLACEHOLDER}, got {template!r}", setting="data.prompt_template")
    # str.format would trip over the braces of LaTeX and JSON in templates.
    return template.replace(PLACEHOLDER, text)


def _messages(value: object, row: Row, key: str, *, setting: str) -> list[dict[str, object]]:
    wrong = ConfigError(
        f"{row.place}: field {key!r} must be a string or a list of {{'role': …, 'content': …}}, "
        f"got {type(value).__name__}",
        setting=setting,
    )
    if not isinstance(value, list) or not value:
        raise wrong
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise wrong
    return value


def _render(messages: list[dict[str, object]], row: Row, tokenizer: TextTokenizer, *, setting: str) -> str:
    if not tokenizer.has_chat_template:
        raise ConfigError(
            f"{row.place}: the prompt needs a chat template, and the tokenizer in {tokenizer.path} has none; "
            f"give the prompts as strings with data.apply_chat_template = false",
            setting=setting,
        )
    try:
        return tokenizer.render_chat(messages)
    except ValueError as error:
        raise ConfigError(f"{row.place}: {error}", setting=setting) from error
