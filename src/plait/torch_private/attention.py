"""Attention kernels and their backward passes, as aten has them. Private to torch: their arguments change.

Called by `plait.graph.ops.attention_kernels` alone, which says what each takes.
"""

import torch

flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention
flash_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
efficient = torch.ops.aten._scaled_dot_product_efficient_attention
efficient_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
