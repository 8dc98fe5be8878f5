// What the site's own search finds, with its own worker: node search.mjs WORKER INDEX QUERIES
import { readFileSync } from "node:fs";

const [worker, index, queries] = process.argv.slice(2);
const waiting = [];
globalThis.self = { postMessage: (message) => waiting.shift()(message) };
(0, eval)(readFileSync(worker, "utf8"));
const ask = (message) =>
  new Promise((resolve) => {
    waiting.push(resolve);
    self.onmessage({ data: message });
  });

const data = JSON.parse(readFileSync(index, "utf8"));
await ask({ type: 0, data });
const found = {};
for (const input of JSON.parse(queries)) {
  const answer = await ask({ type: 2, data: { input } });
  found[input] = answer.data.items.map(({ id }) => data.items[id].location);
}
console.log(JSON.stringify(found));
