// The npm packages ai and @ai-sdk/openai-compatible.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { Animal, cancelled, collected, given, key, model, run, url } from "./common.mjs";

const provider = createOpenAICompatible({ name: "quire", baseURL: url, apiKey: key, includeUsage: true, supportsStructuredOutputs: true });
const greedy = { temperature: 0, maxOutputTokens: given.num_tokens, maxRetries: 0, onError: () => {} };
const chat = { model: provider(model), messages: given.chat, ...greedy };
const text = async (fields) => (await generateText({ ...chat, ...fields })).text;

const call = given.tool_chat[2].tool_calls[0];
const toolChat = [
  given.tool_chat[1],
  {
    role: "assistant",
    content: [
      {
        type: "tool-call",
        toolCallId: call.id,
        toolName: call.function.name,
        input: JSON.parse(call.function.arguments),
      },
    ],
  },
  {
    role: "tool",
    content: [
      {
        type: "tool-result",
        toolCallId: call.id,
        toolName: call.function.name,
        output: { type: "text", value: given.tool_chat[3].content },
      },
    ],
  },
];
const { description, parameters, name } = given.tools[0].function;

const aiTool = ({ function: { description, parameters, name } }) => [
  name,
  tool({ description, inputSchema: jsonSchema(parameters) }),
];
const forced = {
  ...chat,
  tools: Object.fromEntries([aiTool(given.weather)]),
  toolChoice: "required",
  maxOutputTokens: 200,
};
const named = {
  ...forced,
  tools: Object.fromEntries([given.other, given.weather].map(aiTool)),
  toolChoice: { type: "tool", toolName: "weather" },
};
// This library writes its own words for finish reasons.
const reasons = { "tool-calls": "tool_calls" };
const oneCall = ([{ toolName, input }], reason) => [toolName, input, reasons[reason]];

await run({
  chat: text,
  "chat, streamed": () => collected(streamText(chat).textStream, (each) => each),
  seed: () => text({ seed: 5, temperature: 1 }),
  stop: () => text({ stopSequences: [given.stop] }),
  "usage of a stream": async () => {
    const { inputTokens, outputTokens } = await streamText(chat).usage;
    return [inputTokens, outputTokens];
  },
  "tools and results": () =>
    text({
      instructions: given.tool_chat[0].content,
      messages: toolChat,
      tools: { [name]: tool({ description, inputSchema: jsonSchema(parameters) }) },
    }),
  "tool call": async () => {
    const { toolCalls, finishReason } = await generateText(forced);
    return oneCall(toolCalls, finishReason);
  },
  "tool call, streamed": async () => {
    const { toolCalls, finishReason } = streamText(forced);
    return oneCall(await toolCalls, await finishReason);
  },
  "named tool": async () => {
    const { toolCalls, finishReason } = await generateText(named);
    return oneCall(toolCalls, finishReason);
  },
  "fields of vLLM": () => text({ providerOptions: { quire: given.extra } }),
  "structured output": async () => {
    const fields = { maxOutputTokens: given.num_schema_tokens, output: Output.object({ schema: Animal }) };
    return (await generateText({ ...chat, ...fields })).output;
  },
  "bad request": () => text({ temperature: -1 }),
  "too long": () => text({ maxOutputTokens: 4000 }),
  "unknown model": () => text({ model: provider("gpt-9") }),
  "cancelled stream": () =>
    cancelled(async () => {
      const leaving = new AbortController();
      const options = { maxOutputTokens: 1900, providerOptions: { quire: { ignore_eos: true } } };
      for await (const _ of streamText({ ...chat, ...options, abortSignal: leaving.signal }).textStream) {
        leaving.abort();
        break;
      }
    }),
});
