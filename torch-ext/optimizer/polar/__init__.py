"""The polar factor of one matrix and of many: how many at once, which of them share products."""
