"""A tokenizer without files: one token per UTF-8 byte, then the special tokens."""

from __future__ import annotations

from typing import Any

BOS, EOS = 256, 257


class ByteTokenizer:
    """Follows the part of Hugging Face's interface that rlayout asks for."""

    def __init__(self, chat_template: str | None = "chatml", bos: bool = False, closes: bool = False) -> None:
        self.chat_template: Any = chat_template
        self.eos_token_id: Any = EOS
        self._bos = bos
        self._closes = closes

    def encode(self, text: Any, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(text.split("<|end|>")):
            ids += [EOS] * (number > 0) + list(part.encode())
        return [BOS] * (self._bos and add_special_tokens) + ids + [EOS] * (self._closes and add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        assert skip_special_tokens
        return bytes(i for i in token_ids if i < BOS).decode()

    def apply_chat_template(
        self, conversation: Any, *, add_generation_prompt: bool = False, tokenize: bool = True
    ) -> str:
        assert not tokenize
        turns = "".join(f"<{m['role']}>{m['content']}<|end|>" for m in conversation)
        return turns + ("<assistant>" if add_generation_prompt else "")
