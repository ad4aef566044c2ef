"""What a deployment would hold and how fast it would be.

`quire plan` is figures on paper, `quire simulate` the shipped scheduler core on a virtual clock. Imports the core and
nothing else of ours; needs no device, no torch and no server.
"""
