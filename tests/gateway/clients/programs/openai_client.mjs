// The npm package openai.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { Animal, cancelled, collected, given, key, model, run, url } from "./common.mjs";

const client = new OpenAI({ baseURL: url, apiKey: key, maxRetries: 0 });
const greedy = { model, temperature: 0, max_tokens: given.num_tokens };
const chat = (fields) => client.chat.completions.create({ messages: given.chat, ...greedy, ...fields });
const text = async (fields) => (await chat(fields)).choices[0].message.content;
const forced = { tools: [given.weather], tool_choice: "required", max_tokens: 200 };
const named = { tool_choice: { type: "function", function: { name: "weather" } } };
const oneCall = ({ message, finish_reason }) => {
  const { name, arguments: written } = message.tool_calls[0].function;
  return [name, JSON.parse(written), finish_reason];
};
const completion = (fields) => client.completions.create({ prompt: given.prompt, ...greedy, ...fields });

await run({
  chat: text,
  "chat, streamed": async () => collected(await chat({ stream: true }), (chunk) => chunk.choices[0].delta.content ?? ""),
  completion: async () => (await completion()).choices[0].text,
  "completion, streamed": async () => collected(await completion({ stream: true }), (chunk) => chunk.choices[0].text),
  "several choices": async () =>
    (await chat({ n: 3, seed: 3, temperature: 1 })).choices.map((choice) => choice.message.content),
  seed: () => text({ seed: 5, temperature: 1 }),
  stop: () => text({ stop: [given.stop] }),
  "log-probabilities": async () =>
    (await chat({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content.map((entry) => entry.bytes),
  "usage of a stream": async () => {
    const options = { stream: true, stream_options: { include_usage: true } };
    const usages = await collected(await chat(options), (chunk) => chunk.usage);
    return [usages.at(-1).prompt_tokens, usages.at(-1).completion_tokens];
  },
  "tools and results": () => text({ messages: given.tool_chat, tools: given.tools }),
  "tool call": async () => oneCall((await chat(forced)).choices[0]),
  "tool call, streamed": async () => {
    const stream = client.chat.completions.stream({ messages: given.chat, ...greedy, ...forced });
    return oneCall((await stream.finalChatCompletion()).choices[0]);
  },
  "named tool": async () =>
    oneCall((await chat({ ...forced, ...named, tools: [given.other, given.weather] })).choices[0]),
  "fields of vLLM": () => text(given.extra),
  models: () => collected(client.models.list(), (each) => each.id),
  "structured output": async () => {
    const fields = { max_tokens: given.num_schema_tokens, response_format: zodResponseFormat(Animal, "animal") };
    return (await client.chat.completions.parse({ messages: given.chat, ...greedy, ...fields })).choices[0].message.parsed;
  },
  "bad request": () => text({ temperature: -1 }),
  "too long": () => text({ max_tokens: 4000 }),
  "unknown model": () => text({ model: "gpt-9" }),
  "cancelled stream": () =>
    cancelled(async () => {
      for await (const _ of await chat({ stream: true, max_tokens: 1900, ignore_eos: true })) break;
    }),
});
