"""Follows the grammars of structured output, and masks the tokens that may not come next."""
