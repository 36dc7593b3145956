"""The one place where text becomes token ids. After it the prompt *is* its ids, and nothing encodes text again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridasync.errors import ConfigError

Message = Mapping[str, object]


class TextTokenizer:
    """A model's tokenizer: prompts to ids with exactly one BOS where the tokenizer wants one, ids back to text.

    `eos_ids` is every id that ends a response (generation_config.json, config.json and the tokenizer may each
    name some); `eos_id` is the one that supervised responses end with.
    """

    def __init__(self, backend: Any, *, eos_ids: Sequence[int], path: str) -> None:
        self._backend = backend
        self._rust = getattr(backend, "backend_tokenizer", None)
        self.path = path
        self.eos_id: int = int(backend.eos_token_id) if backend.eos_token_id is not None else int(eos_ids[0])
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([self.eos_id, *eos_ids]))
        self.vocab_size: int = len(backend)
        self.bos_id: int | None = self._leading_bos()
        self.has_chat_template: bool = bool(backend.chat_template)

    def _leading_bos(self) -> int | None:
        """The BOS id if this tokenizer puts one in front of what it encodes, else None."""
        bos = self._backend.bos_token_id
        ids = self._backend("a")["input_ids"]
        return int(bos) if bos is not None and ids and ids[0] == bos else None

    def encode_prompts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of prompts. BOS is put in front where the tokenizer wants one and the text doesn't bring it (C46)."""
        encoded = self._encode(texts)
        if self.bos_id is None:
            return encoded
        return [ids if ids[:1] == (self.bos_id,) else (self.bos_id, *ids) for ids in encoded]

    def encode_responses(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of responses to learn: no BOS, and the EOS that ends them is part of them."""
        return [(*ids, self.eos_id) for ids in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        if self._rust is not None:
            return [tuple(e.ids) for e in self._rust.encode_batch(list(texts), add_special_tokens=False)]
        return [tuple(self._backend(text, add_special_tokens=False)["input_ids"]) for text in texts]

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Text of a conversation, up to where the assistant speaks.

        A last message of the assistant is a beginning to be continued, not a finished turn.
        Raises ValueError when the template refuses the messages.
        """
        from jinja2 import TemplateError

        continued = bool(messages) and messages[-1].get("role") == "assistant"
        try:
            rendered = self._backend.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=not continued,
                continue_final_message=continued,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return str(rendered)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens, for rewards and people."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def load_tokenizer(model_dir: str | Path, *, setting: str = "model.hf_checkpoint") -> TextTokenizer:
    """The tokenizer of a Hugging Face directory; nothing is looked up elsewhere. Raises ConfigError."""
    directory = Path(model_dir)
    if not directory.is_dir():
        raise ConfigError(f"model directory {directory} doesn't exist", setting=setting)
    try:
        backend = _load_backend(directory)
    except Exception as error:  # transformers and tokenizers raise anything, bare Exception included
        raise ConfigError(
            f"no usable tokenizer in {directory} (tokenizer.json and tokenizer_config.json are looked for): "
            f"{_first_line(error)}",
            setting=setting,
        ) from error
    eos_ids = _eos_ids(directory, setting=setting)
    if backend.eos_token_id is None and not eos_ids:
        raise ConfigError(
            f"{directory} names no end-of-sequence token: set eos_token_id in its generation_config.json",
            setting=setting,
        )
    return TextTokenizer(backend, eos_ids=eos_ids, path=str(directory))


def _load_backend(directory: Path) -> Any:
    # AutoTokenizer imports torch, which costs the controller's start seconds; tokenizer.json needs no model class.
    if (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    if not any((directory / name).is_file() for name in ("tokenizer_config.json", "tokenizer.model", "vocab.json")):
        raise FileNotFoundError("none of tokenizer.json, tokenizer_config.json, tokenizer.model, vocab.json is there")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def _eos_ids(directory: Path, *, setting: str) -> list[int]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_bytes()).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path} isn't a JSON object: {error}", setting=setting) from error
        values = value if isinstance(value, list) else [value]
        ids.extend(v for v in values if isinstance(v, int) and not isinstance(v, bool))
    return ids


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
