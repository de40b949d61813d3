"""One saved range of a storage: where its bytes are, who has edited them, and the tensors that view them."""
