"""A model folder without weights, made here.

The tokenizer is a byte-level BPE without merges, so any text can be a prompt
and a character is a token. The ids begin with the six special tokens, then
come the printable ASCII characters and the space: an engine whose vocabulary
ends after PRINTABLE therefore writes plain text, in which a stop string can
be found and two texts can be compared by eye.
"""

import json
from pathlib import Path

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
EOS = SPECIAL.index("</s>")
CONTEXT = 16384
TEMPLATE = ("{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def _byte_characters():
    """The byte-level alphabet: what stands for each byte, printable ASCII and the space first.

    Bytes that are printable in Latin-1 stand for themselves, the others get
    the characters from U+0100 on, in the order of the bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = {}
    for byte in range(256):
        stand_ins[byte] = chr(byte) if byte in printable else chr(0x100 + sum(b not in printable for b in range(byte)))
    first = [*range(0x21, 0x7F), 0x20]
    return [stand_ins[b] for b in first + [b for b in range(256) if b not in first]]


CHARACTERS = _byte_characters()
PRINTABLE = len(SPECIAL) + 95   # first id that is no printable ASCII
VOCABULARY = len(SPECIAL) + 256


def _files():
    vocab = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = [{"id": i, "content": s, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for i, s in enumerate(SPECIAL)]
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT,
            "bos_token_id": 1, "eos_token_id": EOS, "torch_dtype": "bfloat16"},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": EOS},
        "tokenizer.json": {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
            "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                      "ignore_merges": False, "vocab": vocab, "merges": []}},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
            "unk_token": "<unk>", "model_max_length": CONTEXT},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "chat_template.jinja": TEMPLATE,
    }


def write(folder):
    """Writes the folder and returns its path. A stand-in for weights is there to be left alone."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    for name, content in _files().items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    return folder
