//! What must agree before an image's bytes may be used in place of others: the source, how it was cut, and how far an
//! engine has made its own parameters of it. Stages never stand in for one another.

/// What the bytes are good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// A checkpoint's tensors cut for the coordinate; any engine can take them.
    Sliced,
    /// An engine's parameters before it post-processed them.
    EngineParams,
    /// An engine's parameters after it post-processed them.
    KernelReady,
}

/// Whose parameters the bytes are.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Engine {
    /// Its name: `transformers`, `vllm`, `sglang`.
    pub name: String,
    /// The release whose parameters they are.
    pub version: String,
}

/// What kernels the bytes were laid out for.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// The GPU's compute capability, as `9.0`.
    pub compute_capability: String,
    /// Kernel backends that were chosen, in the engine's words and order.
    pub backends: Vec<String>,
    /// torch's release.
    pub torch: String,
    /// The KV cache's element type.
    pub kv_dtype: String,
}

/// What must agree before the bytes may be used in place of others.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    /// BLAKE3 over the source's file names, headers and index and the payloads' roots, in hexadecimal.
    pub source: String,
    /// The layout's name: [`LayoutInfo::NAME`](super::LayoutInfo::NAME), and for more than one rank how it was cut.
    pub layout: String,
    /// What the bytes are good for.
    pub stage: Stage,
    /// The dtype that holds the most bytes; empty without tensors.
    pub dtype: String,
    /// `quantization_config` of `config.json` as compact JSON with sorted keys.
    pub quantisation: Option<String>,
    /// `model_type` of `config.json`.
    pub model_type: Option<String>,
    /// The engine; of every stage but `sliced`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// The kernels; of `kernel-ready` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<Kernel>,
}

/// A field in which two fingerprints differ.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{field}` is {found}, {needed} is needed")]
pub struct Mismatch {
    /// The field.
    pub field: &'static str,
    /// What is there.
    pub found: String,
    /// What is needed.
    pub needed: String,
}

impl Fingerprint {
    /// Whether it says of its stage what that stage must say, and nothing that it cannot.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        match (self.stage, &self.engine, &self.kernel) {
            (Stage::Sliced, None, None)
            | (Stage::EngineParams, Some(_), None)
            | (Stage::KernelReady, Some(_), Some(_)) => Ok(()),
            (Stage::Sliced, ..) => Err("fingerprint: `sliced` has neither `engine` nor `kernel`"),
            (Stage::EngineParams, ..) => Err("fingerprint: `engine-params` has `engine` and no `kernel`"),
            (Stage::KernelReady, ..) => Err("fingerprint: `kernel-ready` has `engine` and `kernel`"),
        }
    }

    /// Whether bytes with this fingerprint may be used where `needed` is: the first field that differs, if one does.
    pub fn serves(&self, needed: &Self) -> Result<(), Mismatch> {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".into());
        let json = |value: &dyn erased::Text| value.text();
        let fields: [(&'static str, String, String); 8] = [
            ("stage", json(&self.stage), json(&needed.stage)),
            ("source", self.source.clone(), needed.source.clone()),
            ("layout", self.layout.clone(), needed.layout.clone()),
            ("dtype", self.dtype.clone(), needed.dtype.clone()),
            ("quantisation", text(&self.quantisation), text(&needed.quantisation)),
            ("model_type", text(&self.model_type), text(&needed.model_type)),
            ("engine", json(&self.engine), json(&needed.engine)),
            ("kernel", json(&self.kernel), json(&needed.kernel)),
        ];
        match fields.into_iter().find(|(_, found, needed)| found != needed) {
            None => Ok(()),
            Some((field, found, needed)) => Err(Mismatch { field, found, needed }),
        }
    }
}

/// Anything that can be written, as the text of its JSON.
mod erased {
    pub(super) trait Text {
        fn text(&self) -> String;
    }

    impl<T: serde::Serialize> Text for T {
        fn text(&self) -> String {
            serde_json::to_string(self).unwrap_or_default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sliced() -> Fingerprint {
        Fingerprint {
            source: "s".into(),
            layout: "l".into(),
            stage: Stage::Sliced,
            dtype: "BF16".into(),
            quantisation: None,
            model_type: Some("llama".into()),
            engine: None,
            kernel: None,
        }
    }

    fn engine() -> Fingerprint {
        let engine = Engine { name: "vllm".into(), version: "0.33.0".into() };
        Fingerprint { stage: Stage::EngineParams, engine: Some(engine), ..sliced() }
    }

    fn kernel() -> Fingerprint {
        let kernel = Kernel {
            compute_capability: "9.0".into(),
            backends: vec!["marlin".into()],
            torch: "2.15".into(),
            kv_dtype: "fp8".into(),
        };
        Fingerprint { stage: Stage::KernelReady, kernel: Some(kernel), ..engine() }
    }

    #[test]
    fn no_stage_stands_in_for_another() {
        let stages = [sliced(), engine(), kernel()];
        for (i, found) in stages.iter().enumerate() {
            assert_eq!(found.check(), Ok(()));
            for (j, needed) in stages.iter().enumerate() {
                let served = found.serves(needed);
                assert_eq!(served.is_ok(), i == j);
                assert!(served.is_ok() || served.unwrap_err().field == "stage");
            }
        }
    }

    #[test]
    fn a_stage_says_what_it_must_and_no_more() {
        for wrong in [
            Fingerprint { engine: engine().engine, ..sliced() },
            Fingerprint { engine: None, ..engine() },
            Fingerprint { kernel: kernel().kernel, ..engine() },
            Fingerprint { kernel: None, ..kernel() },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn another_release_gpu_or_backend_is_named() {
        let differs = |found: &Fingerprint, needed: &Fingerprint| found.serves(needed).unwrap_err().field;
        let mut newer = engine();
        newer.engine.as_mut().unwrap().version = "0.34.0".into();
        assert_eq!(differs(&engine(), &newer), "engine");
        let mut other = kernel();
        other.kernel.as_mut().unwrap().compute_capability = "10.0".into();
        assert_eq!(differs(&kernel(), &other), "kernel");
        assert_eq!(differs(&sliced(), &Fingerprint { layout: "m".into(), ..sliced() }), "layout");
    }
}
