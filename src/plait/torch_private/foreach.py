"""One call for many tensors: a list is one kernel launch on a GPU, one Python call on a CPU. Private to torch.

Each does to every tensor of a list what the tensor's own method of that name does.
"""

import torch

add_ = torch._foreach_add_
sub = torch._foreach_sub
sub_ = torch._foreach_sub_
mul_ = torch._foreach_mul_
copy_ = torch._foreach_copy_
clamp_min_ = torch._foreach_clamp_min_
clamp_max_ = torch._foreach_clamp_max_
norm = torch._foreach_norm
