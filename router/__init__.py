"""The OpenAI front door: pairs a prefill with a decode node for each request and relays the answer."""
