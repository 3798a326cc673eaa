//! `docs/api.md`: the management API for readers, from the same description that clients are generated from.

use std::fmt::Write as _;

use serde_json::Value;

/// Methods in the order of the page.
const METHODS: [&str; 4] = ["get", "put", "post", "delete"];

/// Groups of operations in the order of the page.
const GROUPS: [&str; 8] = ["VMs", "quota tree", "sizes", "units", "usage", "events", "host", "health"];

/// The page for an OpenAPI description.
pub(crate) fn page(api: &Value) -> String {
    let mut text = format!(
        "<!-- Generated from backend/api and backend/daemon/src/api by `cargo xtask docs`. Do not edit. -->\n\n\
         # The management API\n\n{}\n\n\
         The machine-readable form is [openapi.json](openapi.json). The sockets are `api.sock` and, read-only, `api-read.sock` \
         in the runtime directory. With curl:\n\n\
         ```\n\
         curl --unix-socket /run/sluice/api.sock http://sluice/v1/vms\n\
         curl --unix-socket /run/sluice/api.sock -X PUT -H 'Content-Type: application/json' \\\n     \
              -d '{{\"memory_bytes\": 17179869184}}' http://sluice/v1/vms/web-1\n\
         ```\n",
        words(&api["info"]["description"])
    );
    for group in GROUPS {
        // Writing to a String cannot fail.
        let _ = write!(text, "\n## {}\n", capital(group));
        for (path, item) in members(&api["paths"]) {
            for method in METHODS.iter().filter(|method| item[**method]["tags"][0] == *group) {
                describe(&mut text, &method.to_uppercase(), path, &item[*method]);
            }
        }
    }
    text.push_str("\n## Objects\n");
    for (name, schema) in members(&api["components"]["schemas"]) {
        object(&mut text, name, schema);
    }
    text
}

fn describe(text: &mut String, method: &str, path: &str, operation: &Value) {
    let _ = writeln!(text, "\n### `{method} {path}`\n\n{}", words(&operation["summary"]));
    if let Some(more) = operation["description"].as_str() {
        let _ = writeln!(text, "\n{}", more.replace('\n', " "));
    }
    text.push('\n');
    for parameter in operation["parameters"].as_array().into_iter().flatten() {
        if parameter["in"] == "query" {
            let _ =
                writeln!(text, "- `?{}`: {}", words(&parameter["name"]), words(&parameter["description"]));
        }
    }
    let request = &operation["requestBody"]["content"];
    if let Some((_, content)) = members(request).next() {
        let _ = writeln!(text, "- body: {}", kind(&content["schema"]));
    }
    let mut errors = Vec::new();
    for (status, response) in members(&operation["responses"]) {
        match members(&response["content"]).next() {
            Some((_, content)) if content["schema"]["$ref"] == "#/components/schemas/Error" => {
                errors.push(format!("`{status}`"));
            }
            Some((_, content)) => {
                let _ = writeln!(text, "- `{status}`: {}", kind(&content["schema"]));
            }
            None => {
                let _ = writeln!(text, "- `{status}`: {}", words(&response["description"]));
            }
        }
    }
    if !errors.is_empty() {
        let _ = writeln!(text, "- {}: [Error](#error)", errors.join(", "));
    }
}

fn object(text: &mut String, name: &str, schema: &Value) {
    let _ = writeln!(text, "\n### {name}\n\n{}", words(&schema["description"]));
    let values: Vec<_> = choices(schema);
    if !values.is_empty() {
        let _ = writeln!(text, "\n| value | meaning |\n|---|---|");
        for (value, meaning) in values {
            let _ = writeln!(text, "| `{value}` | {meaning} |");
        }
        return;
    }
    let required: Vec<_> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let _ = writeln!(text, "\n| field | type | meaning |\n|---|---|---|");
    for (field, property) in members(&schema["properties"]) {
        let optional = if required.contains(&field.as_str()) { "" } else { ", optional" };
        let meaning = words(&property["description"]);
        let _ = writeln!(text, "| `{field}` | {}{optional} | {meaning} |", kind(property));
    }
}

/// The values of an enumeration and their meanings, if documented.
fn choices(schema: &Value) -> Vec<(String, String)> {
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().map(|value| (words(value), String::new())).collect();
    }
    let one = |choice: &Value| Some((choice["enum"][0].as_str()?.to_owned(), words(&choice["description"])));
    schema["oneOf"].as_array().into_iter().flatten().filter_map(one).collect()
}

/// The name of a value's type.
fn kind(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|link| link.rsplit('/').next()) {
        return format!("[{name}](#{})", name.to_lowercase());
    }
    let some = |schema: &&Value| schema["type"] != "null";
    for several in ["oneOf", "allOf"] {
        if let Some(first) = schema[several].as_array().and_then(|all| all.iter().find(some)) {
            return kind(first);
        }
    }
    let name = match &schema["type"] {
        Value::Array(names) => names.iter().find(|name| *name != "null").map(words).unwrap_or_default(),
        name => words(name),
    };
    let bound = |end: &str| schema[end].as_u64().map(|number| number.to_string());
    match name.as_str() {
        "array" => format!("list of {}", kind(&schema["items"])),
        "integer" => match (bound("minimum"), bound("maximum")) {
            (Some(least), Some(most)) => format!("integer, {least} to {most}"),
            _ => name,
        },
        _ => name,
    }
}

fn members(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

fn words(value: &Value) -> String {
    value.as_str().unwrap_or_default().replace('\n', " ")
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_and_every_object_is_on_the_page() {
        let openapi = std::fs::read_to_string(sluice_tests::paths::workspace().join("docs/openapi.json"));
        let openapi = openapi.expect("a description");
        let api: Value = serde_json::from_str(&openapi).expect("JSON");
        let page = page(&api);
        for (path, item) in members(&api["paths"]) {
            for (method, _) in members(item) {
                assert!(page.contains(&format!("### `{} {path}`", method.to_uppercase())), "{method} {path}");
            }
        }
        for (name, _) in members(&api["components"]["schemas"]) {
            assert!(page.contains(&format!("\n### {name}\n")), "{name}");
        }
    }
}
