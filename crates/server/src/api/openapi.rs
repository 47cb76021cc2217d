//! The interface's description, derived from the handlers and their types.

use std::sync::LazyLock;

use axum::response::{IntoResponse, Response};
use refrain::eviction::POLICIES;
use refrain::fusion::METHODS;
use serde_json::Value;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::{completions, documents, info, responses, tokenize};

/// Answers over documents whose chunks are prefilled once.
///
/// OpenAI's interface, with `documents` and `refrain` beside its fields.
#[derive(OpenApi)]
#[openapi(
    info(title = "Refrain", license(name = "MIT OR Apache-2.0")),
    paths(
        completions::chat, completions::completions, responses::respond, documents::add, documents::list, documents::show,
        documents::remove, documents::pin, info::models, info::model, info::methods, info::health, info::ready,
        info::metrics, tokenize::tokenize, tokenize::detokenize, openapi,
    ),
    security((), ("api_key" = [])),
    modifiers(&ApiKeyScheme),
)]
struct Description;

/// Describes the API key, which is a bearer token.
struct ApiKeyScheme;

impl Modify for ApiKeyScheme {
    fn modify(&self, description: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(
            "An API key, where the server needs one. Documents and chunks are visible to the key that brought them.",
        ));
        let components = description.components.get_or_insert_default();
        components.add_security_scheme("api_key", SecurityScheme::Http(scheme.build()));
    }
}

/// This description.
#[utoipa::path(
    get, path = "/openapi.json", security(()),
    responses((status = 200, description = "The description", body = Object)),
)]
pub(super) async fn openapi() -> Response {
    static DESCRIPTION: LazyLock<Value> = LazyLock::new(|| {
        let mut description = serde_json::json!(Description::openapi());
        let schemas = &mut description["components"]["schemas"];
        (schemas["FusionMethod"], schemas["EvictionPolicy"]) = (METHODS.schema(), POLICIES.schema());
        description
    });
    axum::Json(&*DESCRIPTION).into_response()
}
