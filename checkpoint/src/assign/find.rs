//! Goes over the tensors once and finds each one's class; collects by name what does not fit.

use super::class::{Class, Context, Key, Problem, cuts};
use super::count::{self, Counts};
use super::needs::Needed;
use super::template::{Claims, Kind, Stages, Template, Templates};
use super::wrong::{Wrong, no_fact};
use super::{Entry, LayoutOptions, Model, NONE, Slicing};
use crate::error::Result;
use crate::parallel::Refused;
use crate::quant::{Features, MAINS, Parameter, Quantisation};
use crate::recipe::{Recipe, Split};
use crate::tensors::Tensor;
use hashbrown::HashTable;
use std::hash::{BuildHasher as _, Hash as _, Hasher as _, RandomState};

/// The key of `config.json` that says how many rows an embedding has at least.
const VOCABULARY: &str = "vocab_size";

pub(super) struct Found {
    pub(super) entries: Vec<Entry>,
    pub(super) classes: Vec<Class>,
    pub(super) fuses: Vec<Option<(usize, usize)>>,
    pub(super) params: Vec<String>,
    pub(super) layers: u64,
    pub(super) experts: [u64; 2],
    pub(super) expert_layers: Vec<u64>,
}

struct Search<'s, 'm> {
    model: &'s Model<'m>,
    recipe: &'s Recipe,
    options: &'s LayoutOptions,
    slicing: Slicing,
    moe_width: u32,
    quant: &'s Quantisation,
    classes: Vec<Class>,
    problems: Vec<Option<Problem>>,
    by_key: HashTable<u32>,
    hasher: RandomState,
    /// The last class of each template: mostly that of the next tensor of it too.
    last: Vec<u32>,
    name: String,
}

pub(super) fn find(
    model: &Model<'_>,
    recipe: &Recipe,
    options: &LayoutOptions,
    slicing: Slicing,
    moe_width: u32,
    quant: &Quantisation,
    notes: &mut Vec<String>,
) -> Result<Found> {
    let mut templates = Templates::new(recipe, options);
    let mut search = Search {
        model,
        recipe,
        options,
        slicing,
        moe_width,
        quant,
        classes: Vec::new(),
        problems: Vec::new(),
        by_key: HashTable::new(),
        hasher: RandomState::new(),
        last: Vec::new(),
        name: String::new(),
    };
    let mut wrong = Wrong::default();
    let draft_from = match &recipe.draft_from_layer {
        Some(key) => Some(search.fact(key).ok_or_else(|| no_fact(recipe, key))?),
        None => None,
    };
    let mut entries = Vec::with_capacity(model.tensors.len());
    let mut numbers = Vec::new();
    let mut counts = Counts::default();
    let mut needed = Needed::new(recipe);
    let (mut left_out, mut kept) = (0u64, false);
    for number in 0..model.tensors.len() {
        let Some(tensor) = model.tensors.at(number) else { continue };
        let index = templates.of(tensor.name, &mut numbers);
        let unclaimed = templates.unclaimed();
        let Some(template) = templates.all.get(index as usize) else { continue };
        let number_at = |at: Option<usize>| numbers.iter().find(|(i, _)| Some(*i) == at).map(|(_, n)| *n);
        let expert = number_at(template.expert_at);
        let layer = number_at(template.layer_at).or_else(|| match template.is_expert {
            true => Some(number_at(template.place_layer_at).unwrap_or(0)),
            false => None,
        });
        let mut kind = template.kind;
        if let (Kind::Target, Some(from), Some(layer), Some(_)) = (kind, draft_from, layer, template.layer_at)
        {
            kind = if u64::from(layer) >= from { Kind::Draft } else { kind };
        }
        // What is left out on purpose is there all the same.
        if let (Kind::Target, Some(layer), Some(_)) = (kind, layer, template.layer_at) {
            counts.layers = counts.layers.max(u64::from(layer) + 1);
        }
        if let (Some(expert), true) = (expert, kind != Kind::Unloaded) {
            counts.expert(kind == Kind::Draft, layer.unwrap_or(0), expert, &template.param);
        }
        if kind == Kind::Target {
            needed.see(index, tensor.name, layer, template.is_expert);
        }
        if options.exclude.iter().any(|glob| super::glob::matches(glob, tensor.name)) {
            kind = Kind::Unloaded;
            left_out += 1;
        }
        let mut entry = Entry {
            class: NONE,
            template: index,
            layer: layer.unwrap_or(NONE),
            expert: expert.unwrap_or(NONE),
            kind,
            stages: template.stages,
        };
        if kind != Kind::Unloaded {
            let rule = match &template.rule {
                Ok(rule) => *rule,
                Err(Claims::None) => {
                    if !options.allow_unclaimed {
                        wrong.unclaimed.push(tensor.name);
                    }
                    kept = true;
                    unclaimed
                }
                Err(Claims::Two(a, b)) => {
                    wrong.twice.push(format!("{}` (by `{a}` and `{b}`)", tensor.name).trim_end_matches('`'));
                    unclaimed
                }
            };
            let rules = &templates.rules;
            let Some(rule) = rules.get(rule) else { continue };
            entry.class = search.class(number, &tensor, &entry, template, rule);
            search.check_scale(&tensor, template, rule.split, &mut wrong);
            if kind == Kind::Target && rule.split == Split::Vocab && template.param == "weight" {
                wrong.vocabulary(&tensor, search.fact(VOCABULARY));
            }
            if template.is_expert && (expert.is_some() || rule.split != Split::Replicated) {
                let count = match expert {
                    Some(expert) => u64::from(expert) + 1,
                    None => tensor.shape.first().copied().unwrap_or(0),
                };
                counts.at_least(kind == Kind::Draft, layer.unwrap_or(0), count);
            }
        }
        entries.push(entry);
    }
    model.aliases.iter().for_each(|(alias, _)| needed.see_alias(alias));
    wrong.collect(model.tensors, &entries, &search.problems);
    both_ends(model, recipe, &mut entries);
    wrong.refuse(recipe, quant)?;
    if left_out > 0 {
        notes.push(format!("{left_out} tensors are excluded"));
    }
    let all = count::Found { tensors: model.tensors, entries: &entries, classes: &search.classes };
    let experts = counts.check_experts(recipe, &|key| search.fact(key), &all)?;
    let layers = counts.check_layers(recipe, search.fact(&recipe.layer_count), &all)?;
    match needed.check(layers) {
        // What nothing claims may be what is missed, by another name: fused, as a fine-tune has it.
        Err(Refused::Lacking { family, names }) if kept => notes.push(format!(
            "the recipe `{family}` asks for modules that no tensor is the weight of: {names}; tensors that no rule is about are kept whole"
        )),
        checked => checked?,
    }
    Ok(Found {
        entries,
        classes: search.classes,
        fuses: templates.all.iter().map(|t| t.fuse).collect(),
        params: templates.all.iter().map(|t| t.param.clone()).collect(),
        layers,
        experts,
        expert_layers: counts.expert_layers(),
    })
}

/// A tied head is on the last stage, so the embedding it names is on both ends.
fn both_ends(model: &Model<'_>, recipe: &Recipe, entries: &mut [Entry]) {
    for (alias, number) in model.aliases {
        let components: Vec<_> = alias.split('.').collect();
        let last = recipe.last.iter().any(|p| super::template::claims(p, &components).is_some());
        if let Some(entry) = entries.get_mut(*number)
            && last
            && entry.stages == Stages::First
        {
            entry.stages = Stages::FirstAndLast;
        }
    }
}

impl Search<'_, '_> {
    fn fact(&self, key: &str) -> Option<u64> {
        let numbers = &self.model.config.numbers;
        // A model without grouped heads does not say so: every head has its own key and value.
        let implied = || (key == "num_key_value_heads").then(|| numbers.get("num_attention_heads")).flatten();
        numbers.get(key).or_else(implied).copied()
    }

    /// The class of a tensor, made if it is the first one.
    fn class(
        &mut self,
        number: usize,
        tensor: &Tensor<'_>,
        entry: &Entry,
        template: &Template,
        rule: &crate::recipe::Rule,
    ) -> u32 {
        let draft = entry.kind == Kind::Draft;
        let cut = match self.slicing {
            Slicing::Off => false,
            Slicing::Experts => template.is_expert,
            Slicing::All => true,
        };
        let cut = cut && rule.split != Split::Replicated;
        let stacked = template.stacked && rule.split != Split::Replicated;
        let p = Parameter {
            name: &template.param,
            shape: tensor.shape,
            dtype: tensor.dtype,
            stacked,
            transposed: rule.transposed && template.param.is_empty(),
        };
        // What is fused needs its outputs known, cut or not.
        let asked = cut || template.fuse.is_some();
        let own = if asked { self.quant.features(&p) } else { None };
        let module = if asked && own.is_none() {
            self.module(number, tensor.name, template, rule, stacked)
        } else {
            None
        };
        let layer = if stacked && self.options.experts.by_layer() { entry.layer } else { NONE };
        let key = |key: &Key| {
            (key.template, key.dtype, key.features, key.layer, key.draft)
                == (entry.template, tensor.dtype, module, layer, draft)
                && key.shape == tensor.shape
        };
        let slot = entry.template as usize;
        if self.last.len() <= slot {
            self.last.resize(slot + 1, NONE);
        }
        if let Some(&last) = self.last.get(slot)
            && self.classes.get(last as usize).is_some_and(|c| key(&c.key))
        {
            return last;
        }

        let hash = self.hasher.hash_one((entry.template, tensor.shape, tensor.dtype, module, layer, draft));
        let classes = &self.classes;
        let known = self.by_key.find(hash, |&i| classes.get(i as usize).is_some_and(|c| key(&c.key)));
        if let Some(&there) = known {
            if let Some(last) = self.last.get_mut(slot) {
                *last = there;
            }
            return there;
        }
        let width = if template.is_expert { self.moe_width } else { self.options.parallel.tp };
        let target = self.recipe.target(self.options.target);
        let whole = crate::recipe::Rule { split: Split::Replicated, ..rule.clone() };
        let context = Context {
            rule: if cut { rule } else { &whole },
            quant: self.quant,
            width,
            chunked: target.is_some_and(|t| t.chunked),
            vocab_multiple: target.and_then(|t| t.vocab_multiple),
            fact: &|key| self.fact(key),
        };
        let (cuts, outputs, problem) = match cuts(&p, module, &context) {
            Ok((cuts, outputs)) => (cuts, outputs, None),
            Err(problem) => (vec![None], None, Some(problem)),
        };
        let spread = !draft || self.recipe.draft_expert_parallel;
        let key = Key {
            template: entry.template,
            shape: tensor.shape.to_vec(),
            dtype: tensor.dtype,
            features: module,
            layer,
            draft,
        };
        let class = Class {
            key,
            cuts,
            is_expert: template.is_expert,
            lead: stacked && spread && self.options.parallel.ep > 1,
            outputs,
        };
        let number = u32::try_from(self.classes.len()).unwrap_or(NONE);
        self.make_room();
        self.classes.push(class);
        self.problems.push(problem);
        self.by_key.insert_unique(hash, number, |_| hash);
        number
    }

    /// The table keeps no hashes of its own: where it must grow they are made again, from the classes.
    fn make_room(&mut self) {
        let (classes, hasher) = (&self.classes, &self.hasher);
        self.by_key.reserve(1, |&i| {
            let mut state = hasher.build_hasher();
            if let Some(Class { key, .. }) = classes.get(i as usize) {
                (key.template, key.shape.as_slice(), key.dtype, key.features, key.layer, key.draft)
                    .hash(&mut state);
            }
            state.finish()
        });
    }

    /// The features of the module that a parameter belongs to, from its weight.
    fn module(
        &mut self,
        number: usize,
        name: &str,
        template: &Template,
        rule: &crate::recipe::Rule,
        stacked: bool,
    ) -> Option<Features> {
        let module = name.get(..name.len().checked_sub(template.suffix)?)?;
        // What comes after the module's name begins with a dot, or is an ending such as `_scales`.
        let dotted = name.as_bytes().get(module.len()) == Some(&b'.');
        let endings: &[&str] =
            if dotted { &[".weight", ".qweight", ".weight_packed"] } else { &["", "_blocks"] };
        for ending in endings {
            self.name.clear();
            self.name.push_str(module);
            self.name.push_str(ending);
            // Mostly it is the tensor's neighbour, and need not be searched for.
            let tensors = self.model.tensors;
            let beside = [number.wrapping_add(1), number.wrapping_sub(1)];
            let beside = beside.into_iter().filter_map(|i| tensors.at(i)).find(|t| t.name == self.name);
            let found = || tensors.find(&self.name).and_then(|i| tensors.at(i));
            if let Some(weight) = beside.or_else(found) {
                let name = ending.trim_start_matches(['.', '_']);
                let p = Parameter {
                    name,
                    shape: weight.shape,
                    dtype: weight.dtype,
                    stacked,
                    transposed: rule.transposed && name.is_empty(),
                };
                return self.quant.features(&p);
            }
        }
        None
    }

    /// Notes a quantised weight that has no scale beside it.
    fn check_scale(&mut self, tensor: &Tensor<'_>, template: &Template, split: Split, wrong: &mut Wrong) {
        let main = MAINS.contains(&template.param.as_str());
        if self.slicing == Slicing::Off
            || split == Split::Replicated
            || !main
            || !self.quant.needs_scale(&template.param, tensor.dtype)
        {
            return;
        }
        let Some(module) = tensor.name.get(..tensor.name.len().saturating_sub(template.param.len())) else {
            return;
        };
        for scale in ["weight_scale_inv", "weight_scale", "scales", "scale"] {
            self.name.clear();
            self.name.push_str(module);
            self.name.push_str(scale);
            if self.model.tensors.find(&self.name).is_some() {
                return;
            }
        }
        wrong.scales.push(tensor.name);
    }
}
