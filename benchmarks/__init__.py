"""Measures jaxqla beside its peers on FlashQLA's benchmark rows. See README.md in this folder."""
