"""Devices: the only place that asks PyTorch's device modules for streams, events, memory, generators and pinning.

All of it is generic, through `torch.accelerator` and `torch.get_device_module`: CUDA and ROCm, XPU, and any PrivateUse1
backend with streams. What only CUDA has is in `pinning`.
"""
