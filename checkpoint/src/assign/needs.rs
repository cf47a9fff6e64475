//! What a model of a family must have, its recipe says; whatever of it no tensor is of is missing from all experts, from a
//! layer, or from the whole checkpoint, where nothing else would tell.

use super::template::How;
use crate::cause::Names;
use crate::parallel::Refused;
use crate::quant::MAINS;
use crate::recipe::{Pattern, Recipe};
use std::collections::BTreeSet;

/// More layers than this are not listed for one module.
const MOST: usize = 1000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum In {
    Every,
    Experts,
    Dense,
}

struct Need<'r> {
    pattern: &'r Pattern,
    layers: In,
    /// The layers that have it; for what is there once, any number.
    seen: BTreeSet<u32>,
}

/// What is needed, and what of it was seen.
pub(super) struct Needed<'r> {
    recipe: &'r Recipe,
    needs: Vec<Need<'r>>,
    /// By template the needs that its tensors meet.
    met_by: Vec<Option<Vec<usize>>>,
    expert_layers: BTreeSet<u32>,
}

impl<'r> Needed<'r> {
    pub(super) fn new(recipe: &'r Recipe) -> Self {
        let kinds = [
            (&recipe.needs.every, In::Every),
            (&recipe.needs.experts, In::Experts),
            (&recipe.needs.dense, In::Dense),
        ];
        let needs = kinds.into_iter().flat_map(|(patterns, layers)| {
            patterns.iter().map(move |pattern| Need { pattern, layers, seen: BTreeSet::new() })
        });
        Self { recipe, needs: needs.collect(), met_by: Vec::new(), expert_layers: BTreeSet::new() }
    }

    /// Notes a tensor of the target, also one that is left out on purpose.
    pub(super) fn see(&mut self, template: u32, name: &str, layer: Option<u32>, is_expert: bool) {
        if self.needs.is_empty() {
            return;
        }
        if let (true, Some(layer)) = (is_expert, layer) {
            self.expert_layers.insert(layer);
        }
        let slot = template as usize;
        if self.met_by.len() <= slot {
            self.met_by.resize(slot + 1, None);
        }
        let Some(met) = self.met_by.get_mut(slot) else { return };
        let needs = &mut self.needs;
        let met = met.get_or_insert_with(|| {
            (0..).zip(&*needs).filter(|(_, need)| meets(need.pattern, name)).map(|(n, _)| n).collect()
        });
        for n in met {
            if let Some(need) = needs.get_mut(*n) {
                need.seen.insert(layer.unwrap_or(0));
            }
        }
    }

    /// Notes a further name of a tensor: a tied embedding may be stored as the head.
    pub(super) fn see_alias(&mut self, name: &str) {
        let once = self.needs.iter_mut().filter(|n| n.pattern.star().is_none() && meets(n.pattern, name));
        once.for_each(|need| {
            need.seen.insert(0);
        });
    }

    /// Refuses a model of so many layers in which something is missing, by name.
    pub(super) fn check(self, layers: u64) -> Result<(), Refused> {
        let mut names = Names::default();
        for need in &self.needs {
            if need.pattern.star().is_none() {
                if need.seen.is_empty() {
                    names.push(need.pattern.text());
                }
                continue;
            }
            let last = u32::try_from(layers).unwrap_or(u32::MAX);
            let unseen = |layer: &u32| !need.seen.contains(layer);
            let is_dense = |layer: &u32| !self.expert_layers.contains(layer);
            let mut lacks = |layer: u32| names.push(need.pattern.numbered(layer.into()));
            // A name may claim four billion layers: each of these looks at no more of them than were seen, and `MOST`.
            match need.layers {
                In::Every => (0..last).filter(unseen).take(MOST).for_each(&mut lacks),
                In::Dense => (0..last).filter(is_dense).filter(unseen).take(MOST).for_each(&mut lacks),
                In::Experts => {
                    self.expert_layers.range(..last).copied().filter(unseen).take(MOST).for_each(&mut lacks);
                }
            }
        }
        if names.is_empty() {
            return Ok(());
        }
        Err(Refused::Lacking { family: self.recipe.family.clone(), names })
    }
}

/// Whether a tensor is the weight of the module that `pattern` names, or the whole tensor.
fn meets(pattern: &Pattern, name: &str) -> bool {
    let components: Vec<_> = name.split('.').collect();
    match super::template::claims(pattern, &components) {
        Some(How::Module) => components.last().is_some_and(|param| MAINS.contains(param)),
        Some(How::Whole | How::Ending("_blocks")) => true,
        Some(How::Ending(_)) | None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(needs: &str) -> Recipe {
        let text = format!("family = \"x\"\nmodel_types = [\"x\"]\nlayers = \"l.*\"\n{needs}");
        Recipe::parse("x.toml", &text).unwrap()
    }

    fn lacking(needed: Needed<'_>, layers: u64) -> Names {
        match needed.check(layers) {
            Ok(()) => Names::default(),
            Err(Refused::Lacking { names, .. }) => names,
            Err(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_module_that_two_lists_name_is_credited_to_both() {
        let recipe = recipe("needs.experts = [\"l.*.gate\", \"l.*.e.*.up\"]\nneeds.dense = [\"l.*.gate\"]");
        let mut needed = Needed::new(&recipe);
        for layer in 0..2 {
            needed.see(0, &format!("l.{layer}.gate.weight"), Some(layer), false);
        }
        needed.see(1, "l.1.e.0.up.weight", Some(1), true);
        assert_eq!(lacking(needed, 2), Names::default(), "layer 0 is dense, layer 1 has experts");
        let mut needed = Needed::new(&recipe);
        needed.see(0, "l.1.gate.weight", Some(1), false);
        needed.see(1, "l.1.e.0.up.weight", Some(1), true);
        assert_eq!(lacking(needed, 2).first, ["l.0.gate"]);
    }

    #[test]
    fn a_layer_number_of_four_billion_ends_at_once() {
        let recipe = recipe(
            "needs.every = [\"l.*.a\"]\nneeds.experts = [\"l.*.e.*.up\", \"l.*.e.*.down\"]\nneeds.dense = [\"l.*.d\"]",
        );
        let far = u32::MAX - 1;
        let mut needed = Needed::new(&recipe);
        needed.see(0, &format!("l.{far}.e.0.up.weight"), Some(far), true);
        let names = lacking(needed, u64::from(far) + 1);
        // As many of `a` and of `d` as are listed, and the one layer's `down`.
        assert_eq!(names.count, 2 * MOST as u64 + 1);
    }
}
