//! Names of methods with policies: canonical forms, labels for people, and their options.

use refrain::eviction::POLICIES;
use refrain::fusion::METHODS;
use refrain::registry::{Registry, Selected, append, join, split, value_text};

/// A fusion method with an eviction policy, as `NAME[:OPTION=VALUE,…]` without options that are at their defaults.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct VariantName {
    pub method: String,
    pub policy: String,
}

/// Names whose papers write them otherwise than [`derived_label`] does.
const LABELS: &[(&str, &str)] =
    &[("pie", "PIE"), ("h2o", "H2O"), ("multi_inf_llm", "Multi-InfLLM"), ("a3_ex", "A3-ex")];

/// A name in the field's spelling: each word with a capital, `KV` and `LLM` in capitals, nothing between words.
fn derived_label(name: &str) -> String {
    let word = |word: &str| match word {
        "kv" | "llm" => word.to_uppercase(),
        _ => word[..1].to_uppercase() + &word[1..],
    };
    if name.is_ascii() {
        name.split('_').filter(|part| !part.is_empty()).map(word).collect()
    } else {
        name.to_owned()
    }
}

impl VariantName {
    pub(super) fn is_vanilla(&self) -> bool {
        self.method == "vanilla" && self.policy == "full"
    }

    /// The method unless it is vanilla, and the policy unless it is `full`: one of them, or `METHOD+POLICY`.
    pub(super) fn name(&self) -> String {
        match (self.method.as_str(), self.policy.as_str()) {
            (method, "full") => method.to_owned(),
            ("vanilla", policy) => policy.to_owned(),
            (method, policy) => format!("{method}+{policy}"),
        }
    }

    pub(super) fn label(&self) -> String {
        self.name().split('+').map(label).collect::<Vec<_>>().join(" + ")
    }
}

pub(super) fn label(asked: &str) -> String {
    let (name, options) = asked.split_once(':').unwrap_or((asked, ""));
    let written = LABELS.iter().find(|(known, _)| *known == name).map(|(_, label)| (*label).to_owned());
    let label = written.unwrap_or_else(|| derived_label(name));
    if options.is_empty() { label } else { format!("{label} ({})", options.replace(',', ", ")) }
}

/// The name without options, of each part of `METHOD+POLICY`.
pub(super) fn base(name: &str) -> String {
    by_part(name, |part| part.split(':').next().unwrap_or_default().to_owned())
}

/// The value of an option that is given.
pub(super) fn option<'a>(name: &'a str, option: &str) -> Option<&'a str> {
    name.split('+').flat_map(|part| split(part).1).find(|(key, _)| *key == option).map(|(_, value)| value)
}

/// The value of an option that is not given, of the first part that has it.
pub(super) fn default(name: &str, option: &str) -> Option<String> {
    name.split('+').find_map(|part| {
        let name = base(part);
        let options = METHODS.entry(&name).map(|entry| entry.options());
        let options = options.or_else(|_| POLICIES.entry(&name).map(|entry| entry.options())).ok()?;
        Some(value_text(&options.iter().find(|spec| spec.name == option)?.default))
    })
}

/// The name without an option.
pub(super) fn without(name: &str, option: &str) -> String {
    by_part(name, |part| {
        let (name, options) = split(part);
        join(name, options.filter(|(key, _)| *key != option).map(|(key, value)| format!("{key}={value}")))
    })
}

fn by_part(name: &str, of: impl Fn(&str) -> String) -> String {
    name.split('+').map(of).collect::<Vec<_>>().join("+")
}

/// Options that tell how a variant's documents are stored, beside those of its method.
const STORAGE: [&str; 3] = ["store_dtype", "prefix", "oracle"];

/// The canonical text of a selection, with `_` for `-` and without options that are at their defaults. A text that selects
/// nothing is unchanged.
pub(super) fn canonical<T>(registry: &Registry<T>, asked: &str) -> String {
    let bare = STORAGE.iter().fold(asked.to_owned(), |name, option| without(&name, option));
    let Ok(Selected { mut spec, .. }) = registry.select(&bare) else { return asked.to_owned() };
    for (name, value) in STORAGE.iter().filter_map(|name| Some((name, option(asked, name)?))) {
        spec = append(&spec, &format!("{name}={value}"));
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_the_same_has_one_name() {
        assert_eq!(canonical(&METHODS, "lego-link:head-only"), "lego_link:head_only=true");
        assert_eq!(canonical(&METHODS, "a3:ratio=0.15,smoothing=1"), "a3:smoothing=1");
        assert_eq!(canonical(&METHODS, "no-such:x"), "no-such:x");
        assert_eq!(canonical(&METHODS, "a3:ratio=0.15,store_dtype=q4"), "a3:store_dtype=q4");
        assert_eq!(canonical(&METHODS, "a3:ratio=0.5,store_dtype=q4"), "a3:ratio=0.5,store_dtype=q4");
        assert_eq!(canonical(&METHODS, "a3:prefix=system,ratio=0.5"), "a3:ratio=0.5,prefix=system");
        let text = "a3:prefix=text:/x/a.txt";
        assert_eq!(
            (canonical(&METHODS, text).as_str(), option(text, "prefix")),
            (text, Some("text:/x/a.txt"))
        );
        let name = canonical(&POLICIES, "morph_kv:capacity=64,fuse=sum,window=8");
        assert_eq!(name, "morph_kv:capacity=64,window=8");
        assert_eq!((option(&name, "window"), option(&name, "fuse")), (Some("8"), None));
        assert_eq!(without(&name, "window"), "morph_kv:capacity=64");
        let both = "a3:ratio=0.3+a3_ex:capacity=9";
        assert_eq!((base(both).as_str(), option(both, "capacity")), ("a3+a3_ex", Some("9")));
        assert_eq!(without(both, "ratio"), "a3+a3_ex:capacity=9");
        assert_eq!(without("a3:ratio=0.3+a3_ex", "capacity"), "a3:ratio=0.3+a3_ex");
    }

    #[test]
    fn labels_are_spelled_as_the_papers_spell_them() {
        let labels = [
            "sam_kv",
            "prophet_kv",
            "inf_llm",
            "multi_inf_llm",
            "a3",
            "a3_ex",
            "streaming_llm",
            "h2o",
            "pie",
        ]
        .map(label);
        assert_eq!(
            labels,
            ["SamKV", "ProphetKV", "InfLLM", "Multi-InfLLM", "A3", "A3-ex", "StreamingLLM", "H2O", "PIE"]
        );
        let variant =
            |method: &str, policy: &str| VariantName { method: method.to_owned(), policy: policy.to_owned() };
        assert_eq!(variant("vanilla", "full").label(), "Vanilla");
        assert_eq!(variant("vanilla", "h2o:capacity=9").label(), "H2O (capacity=9)");
        assert_eq!(variant("a3:ratio=0.3", "a3_ex").label(), "A3 (ratio=0.3) + A3-ex");
    }
}
