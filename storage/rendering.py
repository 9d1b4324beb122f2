"""The only place where prompts become tokens: rollout, evaluation and warm-up all read what is rendered here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.errors import UserError
from storage.records import Int32Array

Message = Mapping[str, str]

_MOST_UNKNOWN = 0.1
"""Share of unknown tokens in a prompt that passes: a stray character does, text of another alphabet does not."""


class Renderer:
    """Applies a model's chat template, or takes text as it is, and tokenises it with exactly one BOS."""

    def __init__(self, tokenizer: Any, *, chat_template: bool | None, system_prompt: str = "") -> None:
        """Choose how prompts are rendered.

        Args:
            tokenizer: A transformers tokenizer.
            chat_template: True renders every prompt through the chat template, False none. None: lists of messages
                always, text where the tokenizer has a template. Text then counts as one message of the user.
            system_prompt: System message put before every prompt; empty for none.

        Raises:
            UserError: The tokenizer has no template and one is needed, or a system prompt has no template to go into.
        """
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat_template and not has_template:
            raise UserError(
                "model.chat_template=true, but the model's tokenizer has no chat template: set it to null or false, or "
                "use a chat model"
            )
        if system_prompt and not (has_template and chat_template is not False):
            reason = "the model's tokenizer has none" if chat_template is not False else "model.chat_template is false"
            raise UserError(
                f"data.system_prompt needs a chat template, but {reason}: leave data.system_prompt empty and write it "
                "into the prompts"
            )
        self._tokenizer = tokenizer
        self._has_template = has_template
        self._chat_template = chat_template
        self._system_prompt = system_prompt
        self._bos: int | None = tokenizer.bos_token_id
        self._unknown: int | None = tokenizer.unk_token_id

    def render(self, prompt: str | Sequence[Message]) -> tuple[str, Int32Array]:
        """Return the text that the model is shown, and its tokens.

        Args:
            prompt: Text, or messages with ``role`` and ``content``, the last of them not the assistant's.

        Returns:
            The rendered text, as the template or the data wrote it, and int32[n]: its tokens behind exactly one BOS,
            whoever put it there; without BOS for a tokenizer that has none. Never an EOS that the text lacks.

        Raises:
            UserError: ``prompt`` has another type, the template cannot render it, or the tokenizer does not know more
                than a tenth of its tokens.
        """
        text = self._text(prompt)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        unknown = 0 if self._unknown is None else ids.count(self._unknown)
        if unknown > _MOST_UNKNOWN * len(ids):
            raise UserError(
                f"the model's tokenizer does not know {unknown} of its {len(ids)} tokens: use a model that was made "
                "for such text"
            )
        if self._bos is not None:
            start = next((i for i, token in enumerate(ids) if token != self._bos), len(ids))
            ids = [self._bos, *ids[start:]]
        return text, np.asarray(ids, np.int32)

    def decode(self, token_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
        """Return the text of ``token_ids`` without special tokens."""
        text: str = self._tokenizer.decode(np.asarray(token_ids, np.int64).tolist(), skip_special_tokens=True)
        return text

    def _text(self, prompt: str | Sequence[Message]) -> str:
        if isinstance(prompt, str):
            if not self._has_template or self._chat_template is False:
                return prompt
            messages = [{"role": "user", "content": prompt}]
        else:
            messages = _messages(prompt)
            if not self._has_template:
                raise UserError(
                    "it is a list of messages, and the model's tokenizer has no chat template to render them: give a "
                    "string, or use a chat model"
                )
            if self._chat_template is False:
                raise UserError("it is a list of messages, but model.chat_template is false: set it to null or true")
        if self._system_prompt:
            if messages[0]["role"] == "system":
                raise UserError(
                    "it begins with a system message of its own: leave data.system_prompt empty, or drop it"
                )
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        import jinja2  # the template's language; its errors are the only ones a template may raise

        try:
            rendered: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"the model's chat template cannot render messages of {roles}: {error}") from error
        return rendered


def _messages(prompt: Any) -> list[dict[str, str]]:
    """Check a list of messages; returns copies."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise UserError(f"it is of type {type(prompt).__name__}: give a string or a list of messages")
    if not prompt:
        raise UserError("it is an empty list: give at least one message")
    for number, message in enumerate(prompt, start=1):
        if not isinstance(message, Mapping):
            raise UserError(
                f"message {number} is of type {type(message).__name__}: give an object with role and content"
            )
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                fault = "missing" if message.get(field) is None else "not text"
                raise UserError(
                    f"{field} of message {number} is {fault}: give an object with role and content, both text"
                )
    if prompt[-1]["role"] == "assistant":
        raise UserError("its last message is the assistant's: leave the answer out of the prompt")
    return [dict(message) for message in prompt]
