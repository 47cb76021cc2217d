//! A struct's options by text and by JSON, and the errors of wrong ones.

use refrain_registry::{
    Entry, Error, OptionType, Options, Registry, Result, option_specs, read_options, zero_is_none,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Colour {
    Red,
    /// A colour with help of its own.
    DarkBlue,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Paint {
    /// Share of the wall
    /// that is painted.
    #[schemars(range(min = 0.0, max = 1.0))]
    share: f64,
    /// Layers, odd.
    #[schemars(range(min = 1, max = 9))]
    layers: usize,
    /// Minutes to wait; 0 for as many as there are layers.
    #[serde(with = "zero_is_none")]
    #[schemars(with = "usize", range(max = 100))]
    wait: Option<usize>,
    /// Whether it shines.
    glossy: bool,
    /// The colour.
    colour: Colour,
    #[serde(skip)]
    used: bool,
}

impl Default for Paint {
    fn default() -> Self {
        Paint { share: 0.5, layers: 3, wait: None, glossy: false, colour: Colour::Red, used: false }
    }
}

impl Options for Paint {
    const NAME: &'static str = "paint";

    fn validate(&self) -> Result<()> {
        match self.layers % 2 {
            0 => Err(Error::bad_value(Self::NAME, "layers", self.layers, "an odd number")),
            _ => Ok(()),
        }
    }
}

#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Nothing;

impl Options for Nothing {
    const NAME: &'static str = "nothing";
}

static REGISTRY: Registry<Option<Paint>> = Registry {
    what: "wall",
    entries: &[
        Entry::new(Paint::NAME, "paint it", "", option_specs::<Paint>, |values| {
            read_options(values).map(Some)
        }),
        Entry::new(Nothing::NAME, "leave it", "", option_specs::<Nothing>, |values| {
            read_options::<Nothing>(values).map(|_| None)
        }),
    ],
};

#[test]
fn options_are_the_fields_with_their_docs_ranges_and_defaults() {
    let specs = REGISTRY.entry("paint").unwrap().options();
    let names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names, ["share", "layers", "wait", "glossy", "colour"]);
    assert_eq!(specs[0].help, "Share of the wall that is painted.");
    assert_eq!(specs[0].value_type, OptionType::Number { min: 0.0, max: 1.0 });
    assert_eq!(specs[1].value_type, OptionType::Integer { min: 1, max: 9 });
    assert_eq!(specs[2].value_type, OptionType::Integer { min: 0, max: 100 });
    assert_eq!(specs[3].value_type, OptionType::Boolean);
    assert_eq!(specs[4].value_type, OptionType::Choice(vec!["red".to_owned(), "dark_blue".to_owned()]));
    let defaults: Vec<_> = specs.iter().map(|spec| spec.default.clone()).collect();
    assert_eq!(json!(defaults), json!([0.5, 3, 0, false, "red"]));
    assert!(REGISTRY.entry("nothing").unwrap().options().is_empty());
}

#[test]
fn text_and_json_select_the_same() {
    let text = REGISTRY.select("paint: share = 1, glossy,colour=dark_blue,layers=3").unwrap();
    let object = json!({ "name": "paint", "share": 1, "glossy": true, "colour": "dark_blue" });
    let json = REGISTRY.select_json(&object).unwrap();
    let expected = Paint { share: 1.0, glossy: true, colour: Colour::DarkBlue, ..Paint::default() };
    for selected in [text, json] {
        assert_eq!(selected.spec, "paint:share=1,glossy=true,colour=dark_blue");
        assert_eq!(selected.built.as_ref(), Some(&expected));
        let again = REGISTRY.select(&selected.spec).unwrap();
        assert_eq!((again.spec, again.built), (selected.spec, selected.built));
    }
    assert_eq!(REGISTRY.parse("paint:wait=7").unwrap().unwrap().wait, Some(7));
    assert_eq!(REGISTRY.parse("paint:wait=0").unwrap(), Some(Paint::default()));
    assert_eq!(REGISTRY.select_json(&json!("nothing")).unwrap().spec, "nothing");
    assert_eq!(REGISTRY.select_json(&json!({ "name": "nothing" })).unwrap().built, None);
}

#[test]
fn errors_name_option_value_and_what_would_be_right() {
    for (text, parts) in [
        ("pain", &["unknown wall `pain`", "paint, nothing"][..]),
        ("paint:shade=1", &["`paint` takes no option `shade`", "share, layers"]),
        ("paint:used=true", &["no option `used`"]),
        ("nothing:x=1", &["`nothing` takes no option `x`", "none"]),
        ("paint:share=1.5", &["`share` of `paint`", "`1.5`", "from 0 to 1"]),
        ("paint:share=NaN", &["`NaN`", "from 0 to 1"]),
        ("paint:layers=0", &["`0`", "a whole number from 1 to 9"]),
        ("paint:layers=2", &["`2`", "an odd number"]),
        ("paint:layers=-1", &["`-1`", "a whole number from 1 to 9"]),
        ("paint:wait=101", &["`101`", "up to 100"]),
        ("paint:glossy=1", &["`1`", "true or false"]),
        ("paint:colour=blue", &["`blue`", "one of red, dark_blue"]),
        ("paint:share=0.1:layers=3", &["`0.1:layers=3`", "from 0 to 1"]),
    ] {
        let error = REGISTRY.parse(text).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
    }
    for (value, parts) in [
        (json!({ "name": "paint", "share": "0.1" }), &["`\"0.1\"`", "a number from 0 to 1"][..]),
        (json!({ "name": "paint", "layers": 1.5 }), &["`1.5`", "whole number"]),
        (json!({ "name": "paint", "glossy": null }), &["`null`", "true or false"]),
        (json!({ "name": "paint", "shade": 1 }), &["no option `shade`"]),
        (json!({ "share": 1 }), &["a wall is its name", "`name`"]),
        (json!({ "name": 3 }), &["a wall is its name"]),
        (json!(7), &["a wall is its name"]),
    ] {
        let error = REGISTRY.select_json(&value).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{value}: {error}");
    }
}
