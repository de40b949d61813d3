"""Train a LightningModule: the callback offloads every training batch, and leaves validation alone.

pip install '.[lightning]' transformers
python examples/lightning_fit.py               # or: python examples/lightning_fit.py MODEL
"""

import sys

import lightning
import torch
from transformers import AutoModelForCausalLM

from tba.integrations.lightning import OffloadCallback

name = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"


class LanguageModel(lightning.LightningModule):
    """Predicts the next token."""

    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(name)

    def training_step(self, batch, index):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


module = LanguageModel()
tokens = torch.randint(0, module.model.config.vocab_size, (12, 128))
offload = OffloadCallback(tier="nvme")
trainer = lightning.Trainer(max_steps=3, callbacks=[offload], logger=False, enable_checkpointing=False)
trainer.fit(module, torch.utils.data.DataLoader(tokens, batch_size=4))
print(offload.offload.stats())
