"""The live page: shows the block pool, the block tables and the batch in a browser as they change, with a prompt box.

engine ── snapshot ──► LiveFeed ── one encoding ──► every viewer's event stream ──► static/*.js draws
  └──── plan log ────────┘
"""
