"""Programs of workers that do not march in step: what goes to servers and comes from them."""
