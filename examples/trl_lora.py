"""Fine-tune adapters with TRL and PEFT: the Trainer's callback works for every trainer of TRL.

pip install '.[hf]' trl peft
python examples/trl_lora.py                    # or: python examples/trl_lora.py MODEL
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from tba.integrations.transformers import OffloadCallback

name = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"
texts = [
    f"Line {number} of a text: activations leave memory in forward and are back in backward. " * 8
    for number in range(12)
]

offload = OffloadCallback(tier="nvme")  # leave TRL's own activation_offloading off: both would want the same tensors
trainer = SFTTrainer(
    AutoModelForCausalLM.from_pretrained(name),
    SFTConfig(
        "out/trl",
        max_steps=3,
        logging_steps=1,
        per_device_train_batch_size=4,
        max_length=128,
        bf16=torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=AutoTokenizer.from_pretrained(name),
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
    callbacks=[offload],
)
trainer.train()
print(offload.offload.stats())
