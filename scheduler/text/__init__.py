"""Text and tokens: the tokenizer, chat templates, stop strings and grammars. Clients' text is worked on in separate
processes, whose time and memory are bounded."""
