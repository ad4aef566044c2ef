"""Models: the decoder, and the weights it is made of."""
