// A request as a program.

// Left out: how this page reads the answer, and what OpenAI's clients do not know.
const OWN = ["stream", "stream_options", "retain"];

export function asProgram(kind, body) {
  const sent = Object.fromEntries(Object.entries(body).filter(([name]) => !OWN.includes(name)));
  const address = location.origin;
  const json = JSON.stringify(sent, null, 2);
  if (kind === "curl") {
    return `curl ${address}/v1/chat/completions \\\n  -H 'Content-Type: application/json' \\\n  -H "Authorization: Bearer $API_KEY" \\\n  -d '${json.replaceAll("'", "'\\''")}'\n`;
  }
  if (kind === "Python") {
    const literal = `json.loads(r'''${JSON.stringify(sent).replaceAll("'''", "\\u0027\\u0027\\u0027")}''')`;
    return `import json\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${address}/v1", api_key="API_KEY")\nbody = ${literal}\nanswer = client.chat.completions.create(**body)\nprint(answer.choices[0].message.content)\n`;
  }
  return `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${address}/v1", apiKey: process.env.API_KEY ?? "none" });\nconst answer = await client.chat.completions.create(${json});\nconsole.log(answer.choices[0].message.content);\n`;
}
