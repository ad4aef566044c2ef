"""The schedulers behind a gateway: chooses one for each request, and continues a stream elsewhere when one dies."""
