"""Exported by llmapi only from rc21 on."""
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ConversationParams:
    conversation_id: str

    def __post_init__(self):
        text = "" if self.conversation_id is None else str(self.conversation_id).strip()
        if not text:
            raise ValueError("conversation_id is empty")
        self.conversation_id = text
