"""A model's tokenizer and chat template: what data, tool formats and rollouts turn conversations into ids with."""

from slime_retool.chat.codec import TextCodec
from slime_retool.chat.template import TURN_MARK, ChatTemplate, load_tokenizer

__all__ = ["TURN_MARK", "ChatTemplate", "TextCodec", "load_tokenizer"]
