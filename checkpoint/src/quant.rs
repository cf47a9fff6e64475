//! How the parameters of a quantised module follow the split of its weight.
//!
//! A module is split by *features*: outputs or inputs. Each of its parameters has its features along some
//! dimension, one or several to an index: a packed weight eight to a word, a scale one to a group or a block. The
//! quantisation is the checkpoint's own `quantization_config`; one that is not known here is refused.

use crate::parallel::Refused;
use flashboot_core::Dtype;
use serde_json::Value;

/// What `quantization_config` says about how weights are stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Quantisation {
    /// For errors: the method, as the config names it.
    pub(crate) name: String,
    scheme: Scheme,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Scheme {
    #[default]
    Plain,
    /// Weights of the shape they have unquantised, scales one to a block (`[outputs, inputs]` of it), or found from
    /// their shape: one to the tensor, to a row, to a group.
    Scaled { block: Option<[u64; 2]> },
    /// `qweight [inputs, outputs / pack]`.
    Awq { pack: u64, group: Option<u64> },
    /// `qweight [inputs / pack, outputs]`; with an activation order every rank needs every group's scale.
    Gptq { pack: u64, group: Option<u64>, ordered: bool },
    /// compressed-tensors: `weight_packed [outputs, inputs / pack]`.
    Packed { pack: u64, group: Option<u64>, ordered: bool },
}

/// Features of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Features {
    pub(crate) outputs: u64,
    pub(crate) inputs: u64,
}

/// Along which dimension a parameter has features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Axis {
    pub(crate) dim: usize,
    /// Features to an index.
    pub(crate) unit: u64,
    /// Whether a cut inside a unit is impossible (packed words) or only shares it (scales).
    pub(crate) exact: bool,
}

/// A parameter's axes; none where every rank needs all of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Axes {
    pub(crate) outputs: Option<Axis>,
    pub(crate) inputs: Option<Axis>,
}

/// A module's parameter and its form.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parameter<'p> {
    /// `weight`, `bias`, …; empty for a parameter that has the module's own name.
    pub(crate) name: &'p str,
    pub(crate) shape: &'p [u64],
    pub(crate) dtype: Dtype,
    /// Its first dimension counts experts.
    pub(crate) stacked: bool,
    /// `[inputs, outputs]`.
    pub(crate) transposed: bool,
}

/// Why a parameter's axes are not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unknown {
    /// No parameter of that name.
    Name,
    /// The shape is not what the module's weight makes it have.
    Shape(String),
}

/// The names under which a module's weight may stand.
pub(crate) const MAINS: [&str; 3] = ["weight", "qweight", "weight_packed"];

impl Quantisation {
    /// Reads the canonical JSON of `quantization_config`.
    pub(crate) fn parse(config: Option<&str>) -> Result<Self, Refused> {
        let Some(config) = config else {
            return Ok(Self { name: "none".into(), scheme: Scheme::Plain });
        };
        let unknown = |what: &str| Refused::UnknownQuantisation { what: what.into() };
        let value: Value = serde_json::from_str(config).map_err(|e| unknown(&e.to_string()))?;
        let text = |key: &str| value.get(key).and_then(Value::as_str);
        let method = text("quant_method").ok_or_else(|| unknown("without `quant_method`"))?;
        let number = |key: &str| value.get(key).and_then(Value::as_u64).filter(|n| *n > 0);
        let flag = |key: &str| value.get(key).and_then(Value::as_bool).unwrap_or(false);
        let pack = |bits: u64| match bits {
            2 | 4 | 8 => Ok(32 / bits),
            other => Err(unknown(&format!("`{method}` with {other} bits"))),
        };
        let (name, scheme) = match method {
            "fp8" | "fbgemm_fp8" => {
                let block = match value.get("weight_block_size").filter(|b| !b.is_null()) {
                    None => None,
                    Some(block) => {
                        Some(pair(block).ok_or_else(|| unknown("`fp8` with an odd `weight_block_size`"))?)
                    }
                };
                (method.into(), Scheme::Scaled { block })
            }
            "mxfp4" | "mxfp8" => (method.into(), Scheme::Scaled { block: None }),
            "modelopt" | "modelopt_fp4" | "modelopt_fp8" => {
                let inner = value.get("quantization").unwrap_or(&value);
                let algo = inner.get("quant_algo").and_then(Value::as_str).unwrap_or("?").to_uppercase();
                if !["FP8", "NVFP4", "MXFP8", "MXFP4"].contains(&algo.as_str()) {
                    return Err(unknown(&format!("`{method}` with algorithm {algo}")));
                }
                (format!("{method} {algo}"), Scheme::Scaled { block: None })
            }
            "awq" => (
                method.into(),
                Scheme::Awq { pack: pack(number("bits").unwrap_or(4))?, group: number("group_size") },
            ),
            "gptq" => {
                let pack = pack(number("bits").unwrap_or(4))?;
                (method.into(), Scheme::Gptq { pack, group: number("group_size"), ordered: flag("desc_act") })
            }
            "compressed-tensors" => {
                let format = text("format").unwrap_or("?");
                let name = format!("{method} {format}");
                (
                    name,
                    compressed(&value, format)
                        .ok_or_else(|| unknown(&format!("`{method}` of format {format}")))?,
                )
            }
            other => return Err(unknown(&format!("`{other}`"))),
        };
        Ok(Self { name, scheme })
    }

    /// Whether weights of `dtype` under this quantisation mean nothing without a scale.
    pub(crate) fn needs_scale(&self, parameter: &str, dtype: Dtype) -> bool {
        let narrow = matches!(
            dtype,
            Dtype::F8E4M3 | Dtype::F8E5M2 | Dtype::F8E4M3Fnuz | Dtype::F8E5M2Fnuz | Dtype::I8 | Dtype::F4
        );
        match self.scheme {
            Scheme::Plain => false,
            _ => parameter != "weight" || narrow,
        }
    }

    /// The features of the module whose weight this is; `None` if it is none.
    pub(crate) fn features(&self, p: &Parameter<'_>) -> Option<Features> {
        let base = usize::from(p.stacked);
        let at = |i: usize| p.shape.get(base + i).copied();
        let (outputs, inputs) = match (p.name, &self.scheme) {
            ("qweight", Scheme::Awq { pack, .. }) => (at(1)?.checked_mul(*pack)?, at(0)?),
            ("qweight", Scheme::Gptq { pack, .. }) => (at(1)?, at(0)?.checked_mul(*pack)?),
            ("weight_packed", Scheme::Packed { pack, .. }) => (at(0)?, at(1)?.checked_mul(*pack)?),
            ("weight_packed" | "blocks", Scheme::Scaled { .. }) => (at(0)?, at(1)?),
            ("weight" | "", _) if p.transposed && p.shape.len() > base + 1 => (at(1)?, at(0)?),
            ("weight" | "", _) => (at(0)?, at(1).unwrap_or(1)),
            _ => return None,
        };
        Some(Features { outputs, inputs })
    }

    /// The axes of one parameter of a module of these features.
    pub(crate) fn axes(&self, p: &Parameter<'_>, features: Features) -> Result<Axes, Unknown> {
        let base = usize::from(p.stacked);
        let dims = p.shape.len().saturating_sub(base);
        let axis = |i: usize, unit, exact| Some(Axis { dim: base + i, unit, exact });
        let both = |outputs, inputs| Ok(Axes { outputs, inputs });
        let vector = dims <= 1;
        match (p.name, &self.scheme) {
            ("weight" | "", _) if vector => both(axis(0, 1, true).filter(|_| dims == 1), None),
            ("weight" | "", _) if p.transposed => both(axis(1, 1, true), axis(0, 1, true)),
            ("weight" | "", _) => both(axis(0, 1, true), axis(1, 1, true)),
            ("blocks" | "weight_packed", Scheme::Scaled { .. }) => both(axis(0, 1, true), axis(1, 1, true)),
            ("weight_packed", Scheme::Packed { pack, .. }) => both(axis(0, 1, true), axis(1, *pack, true)),
            ("qweight", Scheme::Awq { pack, .. }) => both(axis(1, *pack, true), axis(0, 1, true)),
            ("qweight", Scheme::Gptq { pack, .. }) => both(axis(1, 1, true), axis(0, *pack, true)),
            ("scales" | "qzeros", Scheme::Awq { pack, group } | Scheme::Gptq { pack, group, .. }) => {
                let unit = if p.name == "qzeros" { *pack } else { 1 };
                let outputs = self.found(p, base + 1, features.outputs, Some(unit), unit > 1)?;
                let inputs = self.found(p, base, features.inputs, *group, false)?;
                let ordered = matches!(self.scheme, Scheme::Gptq { ordered: true, .. });
                both(outputs, inputs.filter(|_| !ordered))
            }
            ("g_idx" | "weight_g_idx", _) => both(None, self.found(p, base, features.inputs, Some(1), true)?),
            ("bias", _) => both(self.found(p, base, features.outputs, Some(1), true)?, None),
            ("weight_shape", _) => both(None, None),
            (name, _) if name.ends_with("_scale_2") || name.ends_with("global_scale") => both(None, None),
            ("input_scale" | "activation_scale" | "k_scale" | "v_scale" | "q_scale" | "output_scale", _) => {
                both(None, None)
            }
            ("weight_scale" | "weight_scale_inv" | "scale" | "scales" | "weight_zero_point", _) => {
                self.scale(p, base, dims, features)
            }
            _ => Err(Unknown::Name),
        }
    }

    fn scale(&self, p: &Parameter<'_>, base: usize, dims: usize, f: Features) -> Result<Axes, Unknown> {
        let count: u64 = p.shape.iter().skip(base).fold(1, |n, d| n.saturating_mul(*d));
        if count <= 1 {
            return Ok(Axes::default());
        }
        let (mut outputs, mut inputs, mut exact) = (None, None, false);
        match &self.scheme {
            Scheme::Scaled { block: Some([rows, columns]) } if dims >= 2 => {
                (outputs, inputs) = (Some(*rows), Some(*columns));
            }
            Scheme::Packed { pack, group, ordered } => {
                if p.name == "weight_zero_point" && p.dtype == Dtype::I32 {
                    (outputs, exact) = (Some(*pack), true);
                }
                inputs = *group;
                if *ordered {
                    let outputs = self.found(p, base, f.outputs, outputs, exact)?;
                    return Ok(Axes { outputs, inputs: None });
                }
            }
            _ => {}
        }
        let outputs = self.found(p, base, f.outputs, outputs, exact)?;
        let inputs = if dims >= 2 { self.found(p, base + 1, f.inputs, inputs, false)? } else { None };
        Ok(Axes { outputs, inputs })
    }

    /// The axis along `dim`, which holds `features`: `unit` of them to an index, or as many as divide it.
    fn found(
        &self,
        p: &Parameter<'_>,
        dim: usize,
        features: u64,
        unit: Option<u64>,
        exact: bool,
    ) -> Result<Option<Axis>, Unknown> {
        let Some(&found) = p.shape.get(dim) else {
            return Err(Unknown::Shape(format!("at least {} dimensions", dim + 1)));
        };
        if found == 1 && features != 1 && unit != Some(1) {
            return Ok(None);
        }
        let unit = match unit {
            Some(unit) => unit,
            None if found > 0 && features.is_multiple_of(found) => features / found,
            None => return Err(Unknown::Shape(format!("in dimension {dim} a divisor of {features}"))),
        };
        let needed = features.div_ceil(unit.max(1));
        if found != needed {
            return Err(Unknown::Shape(format!("in dimension {dim} {needed}, and not {found}")));
        }
        Ok(Some(Axis { dim, unit: unit.max(1), exact }))
    }
}

fn pair(value: &Value) -> Option<[u64; 2]> {
    let [rows, columns] = value.as_array()?.as_slice() else { return None };
    Some([rows.as_u64().filter(|n| *n > 0)?, columns.as_u64().filter(|n| *n > 0)?])
}

fn compressed(value: &Value, format: &str) -> Option<Scheme> {
    let groups = value.get("config_groups")?.as_object()?;
    let mut schemes = groups.values().map(|group| {
        let weights = group.get("weights")?;
        let size = weights.get("group_size").and_then(Value::as_u64).filter(|n| *n > 0);
        let order = weights.get("actorder").and_then(Value::as_str).unwrap_or("");
        match format {
            "pack-quantized" => {
                let bits =
                    weights.get("num_bits").and_then(Value::as_u64).filter(|b| [2, 4, 8].contains(b))?;
                Some(Scheme::Packed { pack: 32 / bits, group: size, ordered: order == "group" })
            }
            "float-quantized" | "int-quantized" | "naive-quantized" => {
                let block = weights.get("block_structure").filter(|b| !b.is_null()).map(pair);
                match block {
                    Some(None) => None,
                    Some(block) => Some(Scheme::Scaled { block }),
                    None => Some(Scheme::Scaled { block: None }),
                }
            }
            "nvfp4-pack-quantized" | "mxfp4-pack-quantized" | "mxfp8-quantized" => {
                Some(Scheme::Scaled { block: None })
            }
            _ => None,
        }
    });
    // One scheme for all groups, or it is not known which module has which.
    let first = schemes.next()??;
    schemes.all(|scheme| scheme.as_ref() == Some(&first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quant(json: &str) -> Quantisation {
        Quantisation::parse(Some(json)).unwrap()
    }

    /// Dimension and unit.
    type Place = Option<(usize, u64)>;

    fn axes(q: &Quantisation, name: &str, shape: &[u64], f: (u64, u64)) -> Result<(Place, Place), Unknown> {
        let p = Parameter { name, shape, dtype: Dtype::I32, stacked: false, transposed: false };
        let axes = q.axes(&p, Features { outputs: f.0, inputs: f.1 })?;
        let of = |a: Option<Axis>| a.map(|a| (a.dim, a.unit));
        Ok((of(axes.outputs), of(axes.inputs)))
    }

    #[test]
    fn every_scheme_says_where_its_features_are() {
        let out = |d, u| Some((d, u));
        let fp8 = quant(r#"{"quant_method":"fp8","weight_block_size":[128,128]}"#);
        assert_eq!(axes(&fp8, "weight_scale_inv", &[3, 2], (300, 256)), Ok((out(0, 128), out(1, 128))));
        assert!(matches!(axes(&fp8, "weight_scale_inv", &[2, 2], (300, 256)), Err(Unknown::Shape(_))));
        let fp8 = quant(r#"{"quant_method":"fp8"}"#);
        assert_eq!(axes(&fp8, "weight_scale", &[], (300, 256)), Ok((None, None)));
        assert_eq!(axes(&fp8, "weight_scale", &[300, 1], (300, 256)), Ok((out(0, 1), None)));
        let mx = quant(r#"{"quant_method":"mxfp8"}"#);
        assert_eq!(axes(&mx, "weight_scale", &[300, 8], (300, 256)), Ok((out(0, 1), out(1, 32))));
        let awq = quant(r#"{"quant_method":"awq","bits":4,"group_size":128}"#);
        assert_eq!(axes(&awq, "qweight", &[256, 40], (320, 256)), Ok((out(1, 8), out(0, 1))));
        assert_eq!(axes(&awq, "qzeros", &[2, 40], (320, 256)), Ok((out(1, 8), out(0, 128))));
        let gptq = quant(r#"{"quant_method":"gptq","bits":4,"group_size":128,"desc_act":true}"#);
        assert_eq!(axes(&gptq, "qweight", &[32, 320], (320, 256)), Ok((out(1, 1), out(0, 8))));
        assert_eq!(axes(&gptq, "scales", &[2, 320], (320, 256)), Ok((out(1, 1), None)));
        assert_eq!(axes(&gptq, "g_idx", &[256], (320, 256)), Ok((None, out(0, 1))));
        let packed = quant(
            r#"{"quant_method":"compressed-tensors","format":"pack-quantized","config_groups":{"g":{"weights":{"num_bits":4,"group_size":128}}}}"#,
        );
        assert_eq!(axes(&packed, "weight_packed", &[320, 32], (320, 256)), Ok((out(0, 1), out(1, 8))));
        assert_eq!(axes(&packed, "weight_zero_point", &[40, 2], (320, 256)), Ok((out(0, 8), out(1, 128))));
        assert_eq!(axes(&packed, "weight_shape", &[2], (320, 256)), Ok((None, None)));
        assert_eq!(axes(&packed, "weight_colour", &[2], (320, 256)), Err(Unknown::Name));
        let nv = quant(r#"{"quant_method":"modelopt","quant_algo":"NVFP4"}"#);
        // Stored two to a byte, a scale to sixteen: eight stored bytes.
        assert_eq!(axes(&nv, "weight_scale", &[320, 16], (320, 128)), Ok((out(0, 1), out(1, 8))));
        assert_eq!(axes(&nv, "weight_scale_2", &[], (320, 128)), Ok((None, None)));
    }

    #[test]
    fn an_unknown_quantisation_is_named() {
        for (json, what) in [
            (r#"{"quant_method":"abacus"}"#, "abacus"),
            (r#"{"quant_method":"gptq","bits":3}"#, "3 bits"),
            (r#"{"bits":4}"#, "quant_method"),
            (r#"{"quant_method":"compressed-tensors","format":"woven","config_groups":{}}"#, "woven"),
            (r#"{"quant_method":"modelopt","quant_algo":"INT3"}"#, "INT3"),
            (r#"{"quant_method":"fp8","weight_block_size":[128]}"#, "weight_block_size"),
        ] {
            let said = Quantisation::parse(Some(json)).unwrap_err().to_string();
            assert!(said.contains(what), "{said}");
        }
    }
}
