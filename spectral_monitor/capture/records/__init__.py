"""Records of single calls, as hooks make them."""
