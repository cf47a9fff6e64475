//! What was found not to fit while the tensors were gone over, by name; and which of it a person hears of first.

use super::Entry;
use super::class::Problem;
use crate::cause::Names;
use crate::parallel::Refused;
use crate::quant::Quantisation;
use crate::recipe::Recipe;
use crate::tensors::{Tensor, Tensors};
use std::collections::BTreeMap;

/// What was found not to fit, by name.
#[derive(Default)]
pub(super) struct Wrong {
    pub(super) unclaimed: Names,
    pub(super) twice: Names,
    parameters: Names,
    shapes: Names,
    indivisible: BTreeMap<u32, Names>,
    pub(super) scales: Names,
    /// What `config.json` says, and the tensors that have fewer rows.
    vocabulary: Option<(u64, Names)>,
    fact: Option<String>,
}

impl Wrong {
    /// Notes an embedding or a head with fewer rows than `config.json` says there are tokens. More are padding.
    pub(super) fn vocabulary(&mut self, tensor: &Tensor<'_>, said: Option<u64>) {
        let (Some(said), [rows, _]) = (said, tensor.shape) else { return };
        if *rows < said {
            let (_, names) = self.vocabulary.get_or_insert_with(|| (said, Names::default()));
            names.push(format!("{} ({rows} rows)", tensor.name));
        }
    }

    /// Names the tensors of every class that has a problem.
    pub(super) fn collect(&mut self, tensors: &Tensors, entries: &[Entry], problems: &[Option<Problem>]) {
        if problems.iter().all(Option::is_none) {
            return;
        }
        for (number, entry) in entries.iter().enumerate() {
            let Some(Some(problem)) = problems.get(entry.class as usize) else { continue };
            let name = tensors.at(number).map_or("", |t| t.name);
            match problem {
                Problem::Parameter => self.parameters.push(name),
                Problem::Shape(needed) => self.shapes.push(format!("{name} (needed: {needed})")),
                Problem::Indivisible(width, e) => {
                    let names = self.indivisible.entry(*width).or_default();
                    names.push(format!("{name} ({} is no multiple of {})", e.size, e.by));
                }
                Problem::HalfByte(width) => {
                    self.indivisible.entry(*width).or_default().push(format!("{name} (a byte would be cut)"));
                }
                Problem::NoFact(key) => self.fact = Some(key.clone()),
            }
        }
    }

    /// The first kind of what is wrong, in the order in which a person would mend it.
    pub(super) fn refuse(self, recipe: &Recipe, quant: &Quantisation) -> Result<(), Refused> {
        let family = || recipe.family.clone();
        if !self.twice.is_empty() {
            return Err(Refused::ClaimedTwice { family: family(), names: self.twice });
        }
        if !self.unclaimed.is_empty() {
            return Err(Refused::Unclaimed { family: family(), names: self.unclaimed });
        }
        if let Some(key) = self.fact {
            return Err(no_fact(recipe, &key));
        }
        if let Some((said, names)) = self.vocabulary {
            return Err(Refused::Vocabulary { said, names });
        }
        if !self.scales.is_empty() {
            return Err(Refused::MissingScale { names: self.scales });
        }
        if !self.parameters.is_empty() {
            return Err(Refused::UnknownParameter {
                quantisation: quant.name.clone(),
                names: self.parameters,
            });
        }
        if !self.shapes.is_empty() {
            return Err(Refused::Shape { names: self.shapes });
        }
        match self.indivisible.into_iter().next() {
            Some((parts, names)) => Err(Refused::Indivisible { parts, names }),
            None => Ok(()),
        }
    }
}

/// A number that the recipe needs and the config lacks.
pub(super) fn no_fact(recipe: &Recipe, key: &str) -> Refused {
    Refused::NoFact { family: recipe.family.clone(), key: key.into() }
}
