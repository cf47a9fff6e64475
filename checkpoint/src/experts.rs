//! Which tensors are experts, by name alone: any Hugging Face model, no table of architectures.
//!
//! A routed expert's tensor has a component `experts` (`…layers.3.mlp.experts.17.up_proj.weight`). A number
//! after it is the expert; without one the tensor holds every expert of its layer (`experts.gate_up_proj`).
//! `shared_expert` and `shared_experts` are other components, so they stay with the rest.

use flashboot_core::layout::{ExpertGroup, Place};

/// Where the tensor called `name` belongs.
pub fn place(name: &str) -> Place {
    let (mut layer, mut group) = (None, ExpertGroup::Layer);
    let mut components = name.split('.');
    while let Some(component) = components.next() {
        if component == "experts" {
            let mut rest = components.clone();
            // `experts` as the last component would be a module, not a tensor.
            let Some(next) = rest.next() else { return Place::NonExpert };
            let expert = number(next).filter(|_| rest.next().is_some());
            return Place::Expert { group, layer: layer.unwrap_or(0), expert };
        }
        if component == "mtp" {
            group = ExpertGroup::Stage;
        }
        // The first number before `experts` is the layer's (or the stage's).
        layer = layer.or_else(|| number(component));
    }
    Place::NonExpert
}

fn number(component: &str) -> Option<u64> {
    component.bytes().all(|b| b.is_ascii_digit()).then(|| component.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expert(group: ExpertGroup, layer: u64, expert: Option<u64>) -> Place {
        Place::Expert { group, layer, expert }
    }

    #[test]
    fn experts_are_found_by_name() {
        use ExpertGroup::{Layer, Stage};
        for (name, found) in [
            ("model.layers.3.mlp.experts.17.up_proj.weight", expert(Layer, 3, Some(17))),
            ("model.layers.3.block_sparse_moe.experts.0.w1.weight", expert(Layer, 3, Some(0))),
            ("model.layers.4.mlp.experts.gate_up_proj_blocks", expert(Layer, 4, None)),
            ("layers.39.ffn.experts.383.w2.scale", expert(Layer, 39, Some(383))),
            ("mtp.2.ffn.experts.5.w1.weight", expert(Stage, 2, Some(5))),
            ("experts.1.w", expert(Layer, 0, Some(1))),
            ("model.layers.3.mlp.shared_expert.up_proj.weight", Place::NonExpert),
            ("model.layers.3.mlp.shared_experts.up_proj.weight", Place::NonExpert),
            ("model.layers.3.mlp.experts", Place::NonExpert),
            ("model.embed_tokens.weight", Place::NonExpert),
            ("", Place::NonExpert),
            ("layers.99999999999999999999.experts.1.w", expert(Layer, 0, Some(1))),
        ] {
            assert_eq!(place(name), found, "{name}");
        }
    }
}
