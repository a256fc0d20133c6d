"""One program for all sizes: what of it depends on the sizes of a batch, as functions of them."""
