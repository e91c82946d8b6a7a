"""langchain-openai: an answer, a stream, and a chain."""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI


def main(address: str) -> None:
    """Ask the server at ``address``."""
    name = OpenAI(base_url=f"{address}/v1", api_key="none").models.list().data[0].id
    model = ChatOpenAI(
        base_url=f"{address}/v1", api_key="none", model=name, temperature=0, max_tokens=32
    )
    print("answer:", model.invoke("What is the capital of France?").content)
    print("stream:", "".join(str(c.content) for c in model.stream("Name three fruits.")))
    chain = ChatPromptTemplate.from_template("Say {word} in English.") | model | StrOutputParser()
    print("chain:", chain.invoke({"word": "bonjour"}))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
