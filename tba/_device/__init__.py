"""Devices: the only place that asks PyTorch's device modules for streams, events, memory, generators and pinning.

All of it is generic, by `torch.accelerator` and `torch.get_device_module`: CUDA and ROCm, XPU, and any backend of
PrivateUse1 with streams. What CUDA alone has stands in `pinning`.
"""
