//! The TOML of a recipe. Everything that can be seen to be wrong without a model is refused here.

use super::{Fuse, HeadOrder, Needs, Pattern, Recipe, Rule, Split, Target, TargetRules};
use std::collections::BTreeMap;

/// Far above any family's; bounds what a text from outside can make of itself.
const PATTERNS: usize = 2000;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    family: String,
    model_types: Vec<String>,
    layers: Option<String>,
    layer_count: Option<String>,
    #[serde(default)]
    first: Vec<String>,
    #[serde(default)]
    last: Vec<String>,
    #[serde(default)]
    experts: Vec<String>,
    #[serde(default)]
    draft: Vec<String>,
    draft_from_layer: Option<String>,
    #[serde(default = "yes")]
    draft_expert_parallel: bool,
    #[serde(default)]
    unloaded: Vec<String>,
    rest: Option<Split>,
    #[serde(default)]
    rules: Vec<RawRule>,
    #[serde(default)]
    needs: RawNeeds,
    #[serde(default)]
    target: BTreeMap<String, RawTarget>,
}

fn yes() -> bool {
    true
}

/// Names, and where in the text they stand.
type Listed = Option<toml::Spanned<Vec<String>>>;

#[derive(Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawNeeds {
    #[serde(default)]
    every: Listed,
    #[serde(default)]
    experts: Listed,
    #[serde(default)]
    dense: Listed,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    names: Vec<String>,
    split: Split,
    heads: Option<String>,
    kv_heads: Option<String>,
    order: Option<HeadOrder>,
    parts: Option<u64>,
    #[serde(default)]
    transposed: bool,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTarget {
    #[serde(default)]
    rules: Vec<RawRule>,
    rest: Option<Split>,
    #[serde(default)]
    chunked: bool,
    #[serde(default)]
    fuse: Vec<RawFuse>,
    vocab_multiple: Option<u64>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFuse {
    into: String,
    parts: Vec<String>,
}

pub(super) fn parse(text: &str) -> Result<Recipe, String> {
    let file: File = toml::from_str(text).map_err(|e| e.to_string().trim_end().replace('\n', " "))?;
    if file.family.is_empty() || file.family.contains(|c: char| c.is_control() || c == '/') {
        return Err(format!("`family` is `{}`, a plain name is needed", file.family));
    }
    let layers = file.layers.as_deref().map(Pattern::parse).transpose()?;
    if let Some(layers) = &layers
        && (layers.star().is_none() || layers.is_open())
    {
        return Err(format!("`layers` is `{}`, it needs one `*` for the layer's number", layers.text()));
    }
    let mut targets = Vec::new();
    for (name, raw) in file.target {
        let target = Target::from_name(&name).filter(|t| *t != Target::Checkpoint);
        let target = target.ok_or_else(|| {
            let known: Vec<_> = Target::ENGINES.iter().map(|t| t.name()).collect();
            format!("`target.{name}` is none of {}", known.join(", "))
        })?;
        targets.push((target, target_rules(raw)?));
    }
    let recipe = Recipe {
        family: file.family,
        model_types: file.model_types,
        layers: layers.clone(),
        layer_count: file.layer_count.unwrap_or_else(|| "num_hidden_layers".into()),
        first: patterns(&file.first)?,
        last: patterns(&file.last)?,
        experts: file.experts,
        draft: patterns(&file.draft)?,
        draft_from_layer: file.draft_from_layer,
        draft_expert_parallel: file.draft_expert_parallel,
        unloaded: patterns(&file.unloaded)?,
        rules: file.rules.into_iter().map(rule).collect::<Result<_, _>>()?,
        rest: file.rest,
        targets,
        needs: needs(&file.needs, layers.as_ref())?,
        hash: hash(text, &file.needs),
    };
    if recipe.rest.is_some_and(|split| split == Split::Qkv) {
        return Err("`rest` cannot be `qkv`: its heads are not known".into());
    }
    let count = recipe.rules.iter().map(|r| r.patterns.len()).sum::<usize>();
    if count > PATTERNS {
        return Err(format!("{count} patterns, at most {PATTERNS} are read"));
    }
    Ok(recipe)
}

/// Each text spelled out. What is needed in a layer says in which: it begins as `layers` does.
fn needs(raw: &RawNeeds, layers: Option<&Pattern>) -> Result<Needs, String> {
    let spelled = |texts: &Listed| -> Result<Vec<Pattern>, String> {
        let texts = texts.as_ref().map(|texts| texts.get_ref().as_slice()).unwrap_or_default();
        Ok(patterns(texts)?.iter().flat_map(Pattern::spelled_out).collect())
    };
    let found =
        Needs { every: spelled(&raw.every)?, experts: spelled(&raw.experts)?, dense: spelled(&raw.dense)? };
    let in_layers = |p: &Pattern| {
        let components: Vec<_> = p.text().split('.').collect();
        layers.is_some_and(|l| l.prefix_len(&components).is_some() && l.star() == p.star())
    };
    for p in found.every.iter().chain(&found.experts).chain(&found.dense) {
        let may_be_once = found.every.contains(p) && p.star().is_none();
        if p.is_open() || !(may_be_once || in_layers(p)) {
            let text = p.text();
            return Err(format!(
                "`needs` names `{text}`, a name without stars or one that begins as `layers` does is needed"
            ));
        }
    }
    Ok(found)
}

/// BLAKE3 of the text without the lines of `needs`: a check moves no byte, and what is named by the hash is which bytes are
/// where.
fn hash(text: &str, needs: &RawNeeds) -> String {
    let lists = [&needs.every, &needs.experts, &needs.dense];
    let spans: Vec<_> = lists.into_iter().flatten().map(toml::Spanned::span).collect();
    let (mut hasher, mut at) = (blake3::Hasher::new(), 0);
    for line in text.split_inclusive('\n') {
        let (start, end) = (at, at + line.len());
        at = end;
        let is_of_needs = spans.iter().any(|span| span.start < end && start < span.end)
            || line.trim_start().strip_prefix('[').is_some_and(|l| l.trim_start().starts_with("needs"));
        if !is_of_needs {
            hasher.update(line.as_bytes());
        }
    }
    hasher.finalize().to_hex().to_string()
}

fn patterns(texts: &[String]) -> Result<Vec<Pattern>, String> {
    texts.iter().map(|text| Pattern::parse(text)).collect()
}

fn rule(raw: RawRule) -> Result<Rule, String> {
    let name = raw.names.first().cloned().unwrap_or_default();
    if raw.names.is_empty() {
        return Err("a rule without `names`".into());
    }
    let parts = raw.parts.unwrap_or(1);
    let wrong = |what: &str| Err(format!("the rule of `{name}`: {what}"));
    if parts == 0 || parts > 64 {
        return wrong("`parts` must be 1 to 64");
    }
    match raw.split {
        Split::Qkv if raw.heads.is_none() || raw.kv_heads.is_none() => {
            return wrong("`qkv` needs `heads` and `kv_heads`");
        }
        Split::Qkv if parts > 1 => return wrong("`qkv` has its own parts"),
        Split::Qkv => {}
        _ if raw.kv_heads.is_some() || raw.order.is_some() => {
            return wrong("`kv_heads` and `order` are for `qkv`");
        }
        Split::Vocab | Split::Replicated if raw.heads.is_some() || parts > 1 => {
            return wrong("`heads` and `parts` are for `column` and `row`");
        }
        _ if raw.heads.is_some() && parts > 1 => return wrong("`heads` and `parts` exclude each other"),
        _ => {}
    }
    Ok(Rule {
        patterns: patterns(&raw.names)?,
        split: raw.split,
        heads: raw.heads,
        kv_heads: raw.kv_heads,
        order: raw.order.unwrap_or_default(),
        parts,
        transposed: raw.transposed,
    })
}

fn target_rules(raw: RawTarget) -> Result<TargetRules, String> {
    if raw.vocab_multiple == Some(0) {
        return Err("`vocab_multiple` must be above 0".into());
    }
    if raw.rest == Some(Split::Qkv) {
        return Err("`rest` cannot be `qkv`: its heads are not known".into());
    }
    Ok(TargetRules {
        rules: raw.rules.into_iter().map(rule).collect::<Result<_, _>>()?,
        rest: raw.rest,
        chunked: raw.chunked,
        fuse: raw.fuse.into_iter().map(fuse).collect::<Result<_, _>>()?,
        vocab_multiple: raw.vocab_multiple,
    })
}

fn fuse(raw: RawFuse) -> Result<Fuse, String> {
    let parts = patterns(&raw.parts)?;
    let stars = |text: &str| text.split('.').filter(|c| *c == "*").count();
    let wanted = stars(&raw.into);
    let counts: Vec<_> = raw.parts.iter().map(|part| stars(part)).collect();
    let alike = counts.iter().all(|n| Some(n) == counts.first());
    let stacked = counts.first().is_some_and(|n| *n == wanted + 1);
    if parts.is_empty() || !alike || !(stacked || counts.first() == Some(&wanted)) {
        return Err(format!(
            "`{}`: its parts need as many stars as it has, or one more for the expert's number",
            raw.into
        ));
    }
    if parts.iter().any(Pattern::is_open) || parts.len() > 16 {
        return Err(format!("`{}`: up to 16 parts, without `**`", raw.into));
    }
    Ok(Fuse { into: raw.into, parts })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        parse(text).unwrap_err()
    }

    const HEAD: &str = "family = \"x\"\nmodel_types = [\"x\"]\n";

    #[test]
    fn the_hash_is_of_the_text_without_what_is_only_checked() {
        let rest = "rest = \"replicated\"\n";
        let hash = |text: &str| parse(text).unwrap().hash;
        let bare = format!("{HEAD}layers = \"l.*\"\n{rest}");
        assert_eq!(hash(&bare), blake3::hash(bare.as_bytes()).to_hex().to_string());
        for needs in [
            "needs.every = [\"l.*.a\"]\n",
            "needs.every = [\n  \"l.*.a\", # both\n  \"l.*.b\",\n] # of them\nneeds.dense = [\"l.*.c\"]\n",
            "needs = { every = [\"l.*.a\"], experts = [\"l.*.b\"] }\n",
        ] {
            assert_eq!(hash(&format!("{HEAD}layers = \"l.*\"\n{needs}{rest}")), hash(&bare), "{needs}");
        }
        let table = format!("{bare}[needs]\nevery = [\"l.*.a\"]\n");
        assert_eq!(hash(&table), hash(&bare));
        assert_ne!(hash(&format!("{bare}[[rules]]\nnames = [\"a\"]\nsplit = \"row\"\n")), hash(&bare));
    }

    #[test]
    fn unknown_keys_are_named_wherever_they_stand() {
        for (text, key) in [
            ("colour = 1", "colour"),
            ("[[rules]]\nnames = [\"a\"]\nsplit = \"row\"\ncolour = 1", "colour"),
            ("[target.vllm]\ncolour = 1", "colour"),
            ("[[target.vllm.fuse]]\ninto = \"a\"\nparts = [\"b\"]\ncolour = 1", "colour"),
            ("[target.abacus]\nrest = \"row\"", "target.abacus"),
            ("[[rules]]\nnames = [\"a\"]\nsplit = \"diagonal\"", "diagonal"),
        ] {
            let said = problem(&format!("{HEAD}{text}"));
            assert!(said.contains(key), "{text}: {said}");
        }
        assert!(problem("family = \"x\"").contains("model_types"));
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        for (text, what) in [
            ("layers = \"model.layers\"", "needs one `*`"),
            ("[[rules]]\nnames = []\nsplit = \"row\"", "without `names`"),
            ("[[rules]]\nnames = [\"a\"]\nsplit = \"qkv\"", "needs `heads`"),
            ("[[rules]]\nnames = [\"a\"]\nsplit = \"row\"\nparts = 0", "1 to 64"),
            ("[[rules]]\nnames = [\"a\"]\nsplit = \"vocab\"\nheads = \"h\"", "for `column` and `row`"),
            ("[[rules]]\nnames = [\"a.b*\"]\nsplit = \"row\"", "whole component"),
            ("rest = \"qkv\"", "heads are not known"),
            ("layers = \"l.*\"\nneeds.every = [\"m.*.a\"]", "begins as `layers` does"),
            ("layers = \"l.*\"\nneeds.dense = [\"norm\"]", "begins as `layers` does"),
            ("layers = \"l.*\"\nneeds.every = [\"l.*.**\"]", "begins as `layers` does"),
            ("needs.every = [\"l.*.a\"]", "begins as `layers` does"),
            ("[[target.vllm.fuse]]\ninto = \"a.*.b\"\nparts = [\"c\"]", "as many stars"),
        ] {
            let said = problem(&format!("{HEAD}{text}"));
            assert!(said.contains(what), "{text}: {said}");
        }
    }
}
