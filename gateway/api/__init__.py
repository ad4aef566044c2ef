"""The formats of OpenAI's and Anthropic's APIs: reads bodies into requests, and writes their output as answers.

Each chat API has three modules: `chat.py` reads requests, `chat_answer.py` writes answers of plain text, and
`chat_calls.py` writes answers that may call tools. No module here does I/O.
"""
