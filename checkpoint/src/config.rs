//! What `config.json` says that a checkpoint's bytes do not: tied embeddings, quantisation, the family's name, and
//! the whole numbers that a recipe may ask for (heads, layers, experts). Everything else is the engine's business.

use crate::error::{Error, Result};
use crate::source::Source;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Far above any `config.json`; bounds what is read into memory.
const CAP: u64 = 16 << 20;

/// What was found in `config.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelConfig {
    /// `model_type`.
    pub model_type: Option<String>,
    /// `tie_word_embeddings`, at the top or in `text_config`.
    pub tied_embeddings: bool,
    /// `quantization_config` as canonical JSON (compact, keys sorted by bytes).
    pub quantisation: Option<String>,
    /// Every whole number from 0 at the top and in `text_config`, by its key; the top's where both have one. A number of
    /// heads that is none (negative, a list, a word) counts as 0, by which nothing can be cut: it must not pass for
    /// one that is not given, which has a default.
    pub numbers: BTreeMap<String, u64>,
    /// Why a `config.json` that is there could not be used. Python writes `Infinity`, which is no JSON; the
    /// tensors are sound all the same.
    pub unreadable: Option<String>,
}

impl ModelConfig {
    /// Reads `dir/config.json`; one that is not there says nothing.
    pub(crate) fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let source = match Source::open(&path) {
            Ok(source) => source,
            Err(Error::Missing { .. }) => return Ok(Self::default()),
            Err(e) => return Err(e),
        };
        Ok(Self::parse(&source.all(CAP)?))
    }

    /// Pure part of reading: never fails, says in `unreadable` what it could not use.
    pub fn parse(json: &[u8]) -> Self {
        let value: Value = match serde_json::from_slice(json) {
            Ok(value) => value,
            Err(e) => return Self { unreadable: Some(e.to_string()), ..Self::default() },
        };
        let text = value.get("text_config");
        let either = |key: &str| value.get(key).or_else(|| text?.get(key));
        Self {
            model_type: value.get("model_type").and_then(Value::as_str).map(str::to_owned),
            tied_embeddings: either("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false),
            quantisation: either("quantization_config").filter(|v| !v.is_null()).map(canonical),
            numbers: [text, Some(&value)].into_iter().flatten().flat_map(numbers).collect(),
            unreadable: None,
        }
    }
}

fn numbers(value: &Value) -> impl Iterator<Item = (String, u64)> + '_ {
    let members = value.as_object().into_iter().flatten();
    members.filter_map(|(key, value)| {
        let none = || (key.ends_with("_heads") && !value.is_null()).then_some(0);
        Some((key.clone(), value.as_u64().or_else(none)?))
    })
}

/// Compact JSON with the keys of every object sorted by bytes.
fn canonical(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let mut keys: Vec<_> = map.iter().collect();
            keys.sort_by_key(|(key, _)| *key);
            let members: Vec<_> = keys
                .into_iter()
                .map(|(key, value)| format!("{}:{}", Value::from(key.as_str()), canonical(value)))
                .collect();
            format!("{{{}}}", members.join(","))
        }
        Value::Array(list) => format!("[{}]", list.iter().map(canonical).collect::<Vec<_>>().join(",")),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_and_quantisation_are_found_at_both_levels() {
        let c = ModelConfig::parse(
            br#"{"model_type":"x","text_config":{"tie_word_embeddings":true},"quantization_config":{"b":[1,null],"a":"q"}}"#,
        );
        assert!(c.tied_embeddings);
        assert_eq!(c.model_type.as_deref(), Some("x"));
        assert_eq!(c.quantisation.as_deref(), Some(r#"{"a":"q","b":[1,null]}"#));
        assert!(
            !ModelConfig::parse(
                br#"{"tie_word_embeddings":false,"text_config":{"tie_word_embeddings":true}}"#
            )
            .tied_embeddings
        );
    }

    #[test]
    fn numbers_are_found_at_both_levels_and_the_top_wins() {
        let c = ModelConfig::parse(br#"{"a":1,"b":-2,"text_config":{"a":3,"n_routed_experts":384,"t":1.5}}"#);
        let wanted = [("a".to_owned(), 1), ("n_routed_experts".to_owned(), 384)];
        assert_eq!(c.numbers.into_iter().collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn a_number_of_heads_that_is_none_is_not_one_left_out() {
        for odd in ["-1", "1.5", "\"8\"", "[8, 8]"] {
            let json = format!(r#"{{"num_attention_heads":16,"num_key_value_heads":{odd}}}"#);
            let numbers = ModelConfig::parse(json.as_bytes()).numbers;
            assert_eq!(numbers.get("num_key_value_heads"), Some(&0), "{odd}");
        }
        let left_out = ModelConfig::parse(br#"{"num_attention_heads":16,"num_key_value_heads":null}"#);
        assert_eq!(left_out.numbers.get("num_key_value_heads"), None);
    }

    #[test]
    fn what_is_no_json_is_said_and_harmless() {
        assert!(ModelConfig::parse(b"{\"x\": Infinity}").unreadable.is_some());
    }
}
