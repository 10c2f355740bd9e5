// A certified OpenID provider with its own pages for development: node provider.mjs SETTINGS.
// SETTINGS is JSON: port, jwks, redirect, groups by account. Any password is right.

import { Provider } from "oidc-provider";

const settings = JSON.parse(process.argv[2]);
const issuer = `http://127.0.0.1:${settings.port}`;
const provider = new Provider(issuer, {
  jwks: settings.jwks,
  clients: [
    {
      client_id: "page",
      client_secret: "secret-of-page",
      redirect_uris: [settings.redirect],
      grant_types: ["authorization_code", "refresh_token"],
      token_endpoint_auth_method: "client_secret_post",
    },
    {
      client_id: "cli",
      redirect_uris: [],
      response_types: [],
      grant_types: ["urn:ietf:params:oauth:grant-type:device_code", "refresh_token"],
      token_endpoint_auth_method: "none",
      application_type: "native",
    },
  ],
  claims: { openid: ["sub"], groups: ["groups"], email: ["email", "email_verified"] },
  scopes: ["openid", "offline_access", "groups", "email"],
  conformIdTokenClaims: false,
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({
      sub: id,
      groups: settings.groups[id] || [],
      email: `${id}@example.org`,
      email_verified: true,
    }),
  }),
  features: {
    deviceFlow: { enabled: true },
    revocation: { enabled: true },
    devInteractions: { enabled: true },
  },
  pkce: { required: () => true },
  rotateRefreshToken: true,
  ttl: { IdToken: settings.token_s, AccessToken: settings.token_s, DeviceCode: 600, Grant: 6000,
    Interaction: 600, Session: 6000, RefreshToken: 6000, AuthorizationCode: 60 },
  cookies: { keys: ["for cookies"] },
});
provider.listen(settings.port, "127.0.0.1", () => console.log("ready"));
