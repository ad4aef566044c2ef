"""The executor service: owns the weights, the KV pool and the device, and computes what the scheduler plans.

A plan's way: stream/ receives it, plans/ checks it, device/ runs it on the device's only thread. slots/ turns it into a
`Launch`, models/ (CPU) or cuda/ computes logits from that, and sampling/ chooses tokens, under the masks of grammars/.
checkpoints/ reads the weights, and parallel/ spreads the model over several processes.
"""
