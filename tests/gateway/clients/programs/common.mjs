// Runs a program of a client library for Node: the same as common.py.

import { z } from "zod";

export const address = process.env.GATEWAY;
export const url = `http://${address}/v1`;
export const key = "no key is needed";
export const model = "tiny";
export const given = JSON.parse(process.env.CASE);

// A model whose JSON schema means the same as given.schema.
export const Animal = z.strictObject({
  kind: z.enum(["fox", "bear", "bee"]),
  age: z.number().int().min(1).max(9),
  friends: z.array(z.enum(["Tim", "Mia"])).min(1).max(2),
  is_brave: z.boolean(),
});

export async function run(features) {
  for (const [feature, call] of Object.entries(features)) {
    let found;
    try {
      found = { result: await call() };
    } catch (error) {
      found = { error: [error.constructor.name, error.name, String(error)] };
    }
    console.log(JSON.stringify({ feature, ...found }));
  }
}

async function numDisconnects() {
  const page = await (await fetch(`http://${address}/metrics`)).text();
  return Number(page.match(/^quire_gateway_disconnects_total ([\d.]+)$/m)[1]);
}

// Returns whether the gateway notices that a client leaves its stream, which would last much longer.
export async function cancelled(beginAndLeave) {
  const before = await numDisconnects();
  await beginAndLeave();
  const until = Date.now() + 20000;
  while ((await numDisconnects()) === before && Date.now() < until) await new Promise((done) => setTimeout(done, 20));
  return (await numDisconnects()) === before + 1;
}

export async function collected(stream, pick) {
  const found = [];
  for await (const each of stream) found.push(pick(each));
  return found;
}
