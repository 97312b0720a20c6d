"""Use an exported folder without this toolkit: open it with transformers and compute its loss on given
tokens.

    python tests/story/export.py EXPORT TOKENS.bin WINDOWS LENGTH    prints JSON: loss, parameters, text
"""

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(export: str, file: str, windows: int, length: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    tokens = torch.from_numpy(np.fromfile(file, np.uint16, windows * length + 1).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=tokens[:-1].reshape(windows, length)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), tokens[1:])
        start = tokenizer("import ", return_tensors="pt")
        text = tokenizer.decode(model.generate(**start, max_new_tokens=16, do_sample=False)[0])
    print(
        json.dumps(
            {"loss": float(loss), "parameters": sum(one.numel() for one in model.parameters()), "text": text}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
