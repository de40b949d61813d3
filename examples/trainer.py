"""Fine-tune with transformers' Trainer: one line offloads its activations.

pip install '.[hf]' datasets
python examples/trainer.py                     # or a name or folder of your own: python examples/trainer.py MODEL
"""

import sys

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from tba.integrations.transformers import OffloadCallback

name = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
texts = [
    f"Line {number} of a text: activations leave memory in forward and are back in backward. " * 8
    for number in range(12)
]
data = Dataset.from_dict({"text": texts}).map(
    lambda row: tokenizer(row["text"], truncation=True, max_length=128), remove_columns="text"
)

offload = OffloadCallback(tier="nvme")  # compress="safe8" writes a fraction of it; tier="auto" moves only what must go
trainer = Trainer(
    model,
    TrainingArguments("out/trainer", max_steps=3, logging_steps=1, per_device_train_batch_size=4, report_to="none"),
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[offload],
)
trainer.train()
print(offload.offload.stats())
