//! Configuration by figment: defaults < file < environment < flags, and where each value came from.
//!
//! The file is `flashboot.toml` of the working directory, or the one named by `--config` or `FLASHBOOT_CONFIG`.
//! `FLASHBOOT_REPLICATE__STALL=5s` sets `replicate.stall`: two underscores go one level down. An unknown key is an
//! error that names the key and where it stands.

mod wrong;

use crate::exit::Failure;
use figment::{
    Figment, Metadata, Profile, Provider, Source,
    providers::{Env, Format as _, Toml},
    value::{Dict, Map, Value},
};
use flashboot::config::Config;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};
use wrong::wrong;

const PREFIX: &str = "FLASHBOOT_";
/// What variables of the project's test tools begin with after the prefix: they are no settings of the product.
const TOOLS: [&str; 4] = ["CUDA_SIM_", "CONFORMANCE_", "REFERENCE_MODELS", "REQUIRE"];
const FILE: &str = "flashboot.toml";
/// The most clones of one host: each is a process with an arena of its own.
const MOST_CLONES: u32 = 256;

/// What a flag sets.
#[derive(Debug, Clone)]
pub(crate) struct Override {
    pub(crate) key: &'static str,
    pub(crate) flag: &'static str,
    pub(crate) value: Value,
}

/// Collects what the flags set.
#[derive(Debug, Clone, Default)]
pub(crate) struct Overrides(pub(crate) Vec<Override>);

impl Overrides {
    /// Sets `key` when the flag was given.
    pub(crate) fn set<T: Into<Value>>(&mut self, key: &'static str, flag: &'static str, value: Option<T>) {
        if let Some(value) = value {
            self.0.push(Override { key, flag, value: value.into() });
        }
    }

    /// Sets `key` to the text of what the flag was given.
    pub(crate) fn text<T: ToString>(&mut self, key: &'static str, flag: &'static str, value: Option<&T>) {
        self.set(key, flag, value.map(T::to_string));
    }
}

/// The merged configuration.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) config: Config,
    figment: Figment,
    flags: BTreeMap<&'static str, &'static str>,
}

/// One layer that is a value already.
struct Layer {
    name: &'static str,
    dict: Dict,
}

const DEFAULTS: &str = "default";
const FLAGS: &str = "flag";

impl Provider for Layer {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.name)
    }

    fn data(&self) -> figment::error::Result<Map<Profile, Dict>> {
        Ok(Profile::Default.collect(self.dict.clone()))
    }
}

/// One key with its value and where that came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Setting {
    pub(crate) key: String,
    pub(crate) value: serde_json::Value,
    pub(crate) origin: String,
}

impl Settings {
    /// Merges every layer. `file` is what `--config` gave.
    pub(crate) fn load(file: Option<&Path>, overrides: &Overrides) -> Result<Self, Failure> {
        let in_environment = || std::env::var_os("FLASHBOOT_CONFIG").filter(|path| !path.is_empty());
        let named = file.map(Path::to_owned).or_else(|| in_environment().map(PathBuf::from));
        let path = named.clone().unwrap_or_else(|| FILE.into());
        let mut figment = Figment::from(Layer { name: DEFAULTS, dict: defaults() });
        match std::fs::metadata(&path) {
            // Looked at before it is opened: opening a pipe would wait for its writer.
            Ok(meta) if !meta.is_file() => {
                let path = path.display();
                return Err(Failure::usage(format!("configuration file {path}: is not a regular file")));
            }
            Ok(_) => figment = figment.merge(Toml::file_exact(&path)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && named.is_none() => {}
            Err(e) => return Err(Failure::usage(format!("configuration file {}: {e}", path.display()))),
        }
        // An empty path means that it is not set.
        let empty = std::env::var_os("FLASHBOOT_CACHE").is_some_and(|path| path.is_empty());
        let ignored: &[&str] = if empty { &["config", "cache"] } else { &["config"] };
        let is_ours = |key: &figment::value::UncasedStr| !TOOLS.iter().any(|tool| key.starts_with(tool));
        figment = figment.merge(Env::prefixed(PREFIX).ignore(ignored).filter(is_ours).split("__"));
        let mut dict = Dict::new();
        for Override { key, value, .. } in &overrides.0 {
            set(&mut dict, key, value.clone());
        }
        figment = figment.merge(Layer { name: FLAGS, dict });
        let flags = overrides.0.iter().map(|o| (o.key, o.flag)).collect();
        Self::extract(figment, flags)
    }

    fn extract(figment: Figment, flags: BTreeMap<&'static str, &'static str>) -> Result<Self, Failure> {
        let place = |metadata: Option<&Metadata>, key: &str| origin(metadata, key, &flags);
        let merged: Dict = figment.extract().map_err(|e| problem(e, &place))?;
        let mut unknown = Vec::new();
        find_unknown(&merged, &defaults(), "", &mut unknown);
        if let Some((key, value)) = unknown.first() {
            let from = place(figment.get_metadata(value.tag()), key);
            return Err(Failure::usage(format!(
                "`{key}` (from {from}) is not a configuration key; `flashboot config show` lists them"
            )));
        }
        let config: Config = figment.extract().map_err(|e| problem(e, &place))?;
        let settings = Self { config, figment, flags };
        settings.check()?;
        Ok(settings)
    }

    /// Bounds that types do not have.
    fn check(&self) -> Result<(), Failure> {
        let Config { replicate, memory, tcp, rdma, .. } = &self.config;
        let bounds = [
            ("replicate.clones", Some(replicate.clones), MOST_CLONES),
            ("replicate.depth", Some(replicate.depth), 64),
            ("replicate.tree_length", Some(replicate.tree_length), MOST_CLONES),
            ("replicate.tree_fanout", Some(replicate.tree_fanout), MOST_CLONES),
            ("memory.threads", memory.threads, 1024),
            ("tcp.connections", Some(tcp.connections), 64),
            ("rdma.max_rails", Some(rdma.max_rails), 16),
            ("rdma.outstanding", Some(rdma.outstanding.into()), 255),
        ];
        for (key, value, most) in bounds {
            if value.is_some_and(|value| value == 0 || value > most) {
                let value = value.unwrap_or_default();
                let from = self.origin(key);
                return Err(Failure::usage(format!(
                    "`{key}` is {value} (from {from}): between 1 and {most} are possible"
                )));
            }
        }
        let waits = [
            ("replicate.stall", replicate.stall),
            ("replicate.floor_window", replicate.floor_window),
            ("replicate.setup_timeout", replicate.setup_timeout),
            ("replicate.transfer_timeout", replicate.transfer_timeout),
            ("replicate.pull_timeout", replicate.pull_timeout),
            ("replicate.import_timeout", replicate.import_timeout),
            ("tcp.silence", tcp.silence),
        ];
        for (key, wait) in waits {
            if wait.is_zero() {
                let from = self.origin(key);
                return Err(Failure::usage(format!("`{key}` is 0 (from {from}): a wait must be longer")));
            }
        }
        Ok(())
    }

    fn origin(&self, key: &str) -> String {
        origin(self.figment.find_metadata(key), key, &self.flags)
    }

    /// Every key, in order.
    pub(crate) fn all(&self) -> Vec<Setting> {
        let mut found = Vec::new();
        let config = serde_json::to_value(&self.config).unwrap_or_default();
        leaves(&config, "", &mut |key, value| {
            found.push(Setting { key: key.to_owned(), value: value.clone(), origin: self.origin(key) });
        });
        found
    }
}

fn defaults() -> Dict {
    // Plain structs of texts and numbers serialise.
    Value::serialize(Config::default()).ok().and_then(Value::into_dict).unwrap_or_default()
}

fn set(dict: &mut Dict, key: &str, value: Value) {
    match key.split_once('.') {
        None => drop(dict.insert(key.to_owned(), value)),
        Some((section, rest)) => {
            let mut inner = dict.remove(section).and_then(Value::into_dict).unwrap_or_default();
            set(&mut inner, rest, value);
            dict.insert(section.to_owned(), inner.into());
        }
    }
}

/// Keys of `found` that `known` does not have, with a leaf below each, whose tag tells where it came from.
fn find_unknown<'v>(found: &'v Dict, known: &Dict, above: &str, unknown: &mut Vec<(String, &'v Value)>) {
    for (name, value) in found {
        let key = if above.is_empty() { name.clone() } else { format!("{above}.{name}") };
        match (known.get(name), value) {
            (None, value) => {
                let (mut key, mut leaf) = (key, value);
                while let Some((name, next)) = leaf.as_dict().and_then(|d| d.iter().next()) {
                    key = format!("{key}.{name}");
                    leaf = next;
                }
                unknown.push((key, leaf));
            }
            (Some(Value::Dict(_, known)), Value::Dict(_, inner)) => find_unknown(inner, known, &key, unknown),
            _ => {}
        }
    }
}

fn leaves(value: &serde_json::Value, key: &str, tell: &mut impl FnMut(&str, &serde_json::Value)) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                leaves(value, &key, tell);
            }
        }
        leaf => tell(key, leaf),
    }
}

/// Where a value came from, as a person would look it up.
fn origin(metadata: Option<&Metadata>, key: &str, flags: &BTreeMap<&'static str, &'static str>) -> String {
    let Some(metadata) = metadata else { return DEFAULTS.into() };
    match (&*metadata.name, &metadata.source) {
        (DEFAULTS, _) => DEFAULTS.into(),
        (FLAGS, _) => flags.get(key).copied().unwrap_or(FLAGS).into(),
        (_, Some(Source::File(path))) => path.display().to_string(),
        _ => format!("{PREFIX}{}", key.replace('.', "__").to_uppercase()),
    }
}

fn problem(e: figment::Error, place: &impl Fn(Option<&Metadata>, &str) -> String) -> Failure {
    let one = |e: figment::Error| {
        let key = e.path.join(".");
        let from = place(e.metadata.as_ref(), &key);
        let what = wrong(&e.kind);
        if key.is_empty() { format!("{from}: {what}") } else { format!("`{key}` (from {from}): {what}") }
    };
    Failure::usage(e.into_iter().map(one).collect::<Vec<_>>().join("; "))
}
