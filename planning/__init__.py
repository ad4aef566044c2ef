"""What a deployment would hold and how fast it would be: figures on paper (`quire plan`), and the shipped scheduler core
on a virtual clock (`quire simulate`). Imports the core and nothing else of ours; needs no device, no torch, no server."""
